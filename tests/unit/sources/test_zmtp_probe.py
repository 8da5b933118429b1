"""Probes of real ZMQ sockets: every type tells itself, nobody behind it notices, and no message goes astray."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.sources import zmq_children as zmqs
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket, SocketOwner, ZmtpProbe
from vllmdiag.sources import probe as probes
from vllmdiag.sources import probe_gates, zmtp
from vllmdiag.sources.probe import probe

TYPES = ("ROUTER", "DEALER", "PUB", "XPUB", "PULL", "PUSH", "SUB", "XSUB", "REP", "REQ", "PAIR")
WITH_IDENTITY = {"ROUTER", "DEALER", "REQ"}
ASKED = 12
HELD = 20
MESSAGES = 2000

ALL_TYPES = """
bound = {}
for kind in TYPES:
    path = sys.argv[1] + "/" + PATHS[kind]
    for address in ("ipc://" + path, "tcp://127.0.0.1:*"):
        options = {"IDENTITY": b"eng0"} if kind == "DEALER" else {"IDENTITY": b"i" * 200} if kind == "REQ" else {}
        if kind == "ROUTER":
            options["ROUTER_MANDATORY"] = 1
        one = bind(kind, address, **options)
        bound[one.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\\0").decode()] = (kind, one)
say({name: kind for name, (kind, _) in bound.items()})
for line in sys.stdin:
    seen = {}
    for name, (kind, one) in bound.items():
        heard = 0
        while one.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            one.recv_multipart()
            heard += 1
        if kind == "ROUTER":
            try:
                one.send_multipart([b"", b"hello"], zmq.DONTWAIT)
                routed = True
            except zmq.ZMQError:
                routed = False
        else:
            routed = kind in ("PUSH", "DEALER", "REQ", "PAIR") and bool(one.getsockopt(zmq.EVENTS) & zmq.POLLOUT)
        seen[name] = [heard, routed]
    say(seen)
"""
SENDER = """
out = bind(sys.argv[1], "ipc://" + sys.argv[2], SNDHWM=0, LINGER=-1)
say("bound")
sys.stdin.readline()
out.getsockopt(zmq.EVENTS)
while not out.poll(1000, zmq.POLLOUT):
    pass
for n in range(int(sys.argv[3])):
    out.send(b"%d" % n)
say("sent")
sys.stdin.read()
"""
CONSUMER = """
import threading
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
source = context.socket(getattr(zmq, sys.argv[1]))
source.setsockopt(zmq.RCVHWM, 0)
monitor = source.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
source.connect("ipc://" + sys.argv[2])
monitor.recv_multipart()
say("connected")
got = 0
while got < int(sys.argv[3]) and (source.poll(500) or not over.is_set()):
    if source.poll(0):
        source.recv()
        got += 1
say(got)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name: a socket's path, with its 36 characters of UUID, has 107 at most."""
    return tmp_path_factory.mktemp("z")


@pytest.fixture
def no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows what a probe would meet where a gate would have spared it."""
    monkeypatch.setattr(probes, "refusal", lambda *_: None)


def probed(look: Snapshot, progress: Callable[[str], None] = lambda _: None) -> tuple[ZmtpProbe, ...]:
    """Its probes, with all the patience that a busy machine needs."""
    return probes.with_probes(look, progress, budget_s=60, total_s=600).zmtp


def every_type(children: Any, directory: Path) -> tuple[int, dict[str, str]]:
    """A process with two sockets of every type, and the type by address."""
    paths = {kind: os.path.basename(zmqs.ipc_path(directory)) for kind in TYPES}
    code = f"TYPES, PATHS = {TYPES!r}, {paths!r}\n" + ALL_TYPES
    child = children.program(*zmqs.command(code), str(directory))
    return child.pid, json.loads(children.line(child.pid))


def test_every_type_tells_itself_over_ipc_and_tcp(children: Any, directory: Path) -> None:
    pid, kinds = every_type(children, directory)
    found = probed(zmqs.snapshot(pid))
    assert {p.endpoint: p.socket_type for p in found} == kinds
    assert len(found) == 2 * len(TYPES)
    for answer in found:
        assert (answer.outcome, answer.version, answer.owner, answer.reason) == ("ready", "3.1", pid, "")
        assert answer.took_s is not None
        assert (answer.identity_length is not None) == (answer.socket_type in WITH_IDENTITY)
    dealer, request = (next(p for p in found if p.socket_type == kind) for kind in ("DEALER", "REQ"))
    assert (dealer.identity, dealer.identity_length) == (b"eng0".hex(), 4)
    assert (request.identity, request.identity_length) == ("", 200)


def test_the_application_hears_nothing_and_has_nobody_to_send_to(
    children: Any, directory: Path, eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, kinds = every_type(children, directory)
    before = zmqs.n_fds(pid)
    look = zmqs.snapshot(pid)
    for _ in range(ASKED):
        eventually(lambda: all(not s.recv_q for s in zmqs.listeners(pid)))
        assert {p.outcome for p in probed(look)} == {"ready"}
    eventually(lambda: zmqs.n_fds(pid) == before)
    children.tell(pid, "look")
    assert json.loads(children.line(pid)) == {name: [0, False] for name in kinds}


@pytest.mark.parametrize(("kind", "peer"), [("PUSH", "PULL"), ("DEALER", "DEALER")])
@pytest.mark.parametrize("become_a_peer", [False, True])
def test_no_message_is_dealt_to_twenty_probes_and_most_would_be_to_peers(
    become_a_peer: bool, kind: str, peer: str, children: Any, directory: Path
) -> None:
    path = zmqs.ipc_path(directory)
    sender = zmqs.start(children, SENDER, kind, path, str(MESSAGES))
    listener = zmqs.only_listener(sender)
    held = []
    for _ in range(HELD):
        connection = probes._dial(listener, sender, time.monotonic() + 60)
        held.append(connection)
        assert zmtp.ask(connection, time.monotonic() + 60).socket_type == kind
        if become_a_peer:  # what a probe never does: this shows that the count below would tell
            ready = b"\x05READY\x0bSocket-Type" + len(peer).to_bytes(4, "big") + peer.encode()
            connection.send(bytes([4, len(ready)]) + ready)
    consumer = zmqs.start(children, CONSUMER, peer, path, str(MESSAGES))
    children.tell(sender, "go")
    assert children.line(sender) == '"sent"'
    if become_a_peer:
        children.tell(consumer, "over")
    got = int(children.line(consumer))
    for connection in held:
        connection.close()
    assert got < MESSAGES // 2 if become_a_peer else got == MESSAGES


def test_without_a_consumer_twenty_probes_take_nothing(children: Any, directory: Path) -> None:
    blocked = SENDER.replace("while not out.poll(1000, zmq.POLLOUT):\n    pass", "say(out.poll(0, zmq.POLLOUT))")
    sender = zmqs.start(children, blocked, "PUSH", zmqs.ipc_path(directory), "1")
    listener = zmqs.only_listener(sender)
    held = [probes._dial(listener, sender, time.monotonic() + 60) for _ in range(HELD)]
    assert {zmtp.ask(connection, time.monotonic() + 60).socket_type for connection in held} == {"PUSH"}
    children.tell(sender, "go")
    assert children.line(sender) == "0"
    for connection in held:
        connection.close()


def test_the_gil_does_not_matter_only_the_io_thread_does(children: Any, directory: Path) -> None:
    burn = "bind('ROUTER', 'ipc://' + sys.argv[1])\nsay('burning')\nwhile True: pass"
    pid = zmqs.start(children, burn, zmqs.ipc_path(directory))
    assert [p.outcome for p in probed(zmqs.snapshot(pid))] == ["ready"]


HEIR = """
bound = bind("PULL", "ipc://" + sys.argv[1])
child = os.fork()
if child == 0:
    import ctypes, signal
    say(os.getpid())
    signal.pause()
os._exit(0)
"""


def test_a_listener_without_an_io_thread_is_silent_and_is_not_asked_twice(children: Any, directory: Path) -> None:
    # The child of a fork holds the listener when its parent has died, and the threads of the parent are not in it.
    child = children.program(*zmqs.command(HEIR), zmqs.ipc_path(directory))
    heir = int(children.line(child.pid))
    child.wait()
    try:
        (listener,), owners = zmqs.listeners(heir), zmqs.observed(heir)
        first = probe(listener, owners, budget_s=0.2)
        assert first.outcome == "silent"
        assert "no signature came" in first.reason
        assert first.next == f"vllmdiag stacks {heir}"
        second = probe(listener, owners)
        assert (second.outcome, second.reason) == ("gated", "1 connection waits to be accepted already")
        assert zmqs.only_listener(heir).recv_q == 1
    finally:
        os.kill(heir, signal.SIGKILL)


PLAIN = """
listener = socket.socket(socket.AF_UNIX if len(sys.argv) > 1 else socket.AF_INET)
listener.bind(sys.argv[1] if len(sys.argv) > 1 else ("127.0.0.1", 0))
listener.listen(100)
say("listening")
for line in sys.stdin:
    if line == "close\\n":
        listener.close()
        say("closed")
    elif line == "answer\\n":
        peer, _ = listener.accept()
        peer.send(b"HTTP/1.1 4")
        peer.shutdown(socket.SHUT_WR)
        say(peer.recv(100).decode("latin-1"))
    elif line == "hang up\\n":
        peer, _ = listener.accept()
        peer.close()
        say("hung up")
"""


@pytest.mark.parametrize(
    ("act", "outcome", "words", "said"),
    [("answer", "unexpected", "no ZMTP signature", '""'), ("hang up", "closed", "hung up", '"hung up"')],
)
def test_one_that_is_no_zmq_socket_after_all_is_sent_nothing(
    act: str, outcome: str, words: str, said: str, children: Any, directory: Path
) -> None:
    pid = zmqs.start(children, PLAIN, zmqs.ipc_path(directory))
    children.tell(pid, act)
    (found,) = probed(zmqs.snapshot(pid))
    assert found.outcome == outcome
    assert words in found.reason
    assert children.line(pid) == said


def test_a_path_that_is_gone_is_said_to_be_and_so_is_one_where_nobody_listens(children: Any, directory: Path) -> None:
    path = zmqs.ipc_path(directory)
    pid = zmqs.start(children, "bind('PULL', 'ipc://' + sys.argv[1]); say('bound'); sys.stdin.read()", path)
    look = zmqs.snapshot(pid)
    os.unlink(path)
    assert [p.outcome for p in probed(look)] == ["gone"]
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    assert [p.outcome for p in probed(look)] == ["refused"]


def test_a_listener_that_has_closed_is_not_asked(children: Any, directory: Path) -> None:
    pid = zmqs.start(children, PLAIN, zmqs.ipc_path(directory))
    look = zmqs.snapshot(pid)
    children.tell(pid, "close")
    assert children.line(pid)
    (found,) = probed(look)
    assert (found.outcome, found.reason) == ("gated", "it does not listen any more")


@pytest.mark.parametrize("family", ["unix", "tcp"])
@pytest.mark.usefixtures("no_gates")
def test_a_full_accept_queue_never_makes_us_wait_longer_than_the_budget(
    family: str, children: Any, directory: Path
) -> None:
    code = PLAIN.replace("listen(100)", "listen(0)")
    pid = zmqs.start(children, code, *([zmqs.ipc_path(directory)] if family == "unix" else []))
    listener = next(s for s in zmqs.sockets(pid) if s.state == "LISTEN")
    owners = zmqs.observed(pid)
    outcomes = [probe(listener, owners, budget_s=0.2).outcome for _ in range(4)]
    assert (outcomes[0], outcomes[-1]) == ("silent", "full")


@pytest.mark.needs("root")
@pytest.mark.usefixtures("no_gates")
def test_another_user_is_told_that_it_is_not_permitted(children: Any, directory: Path, as_nobody: Any) -> None:
    pid = zmqs.start(children, PLAIN, zmqs.ipc_path(directory))
    listener, owners = zmqs.only_listener(pid), zmqs.observed(pid)
    found = as_nobody(lambda: probe(listener, owners))
    assert (found.outcome, found.reason) == ("not-permitted", "EACCES: the kernel refuses it to this user")
    assert found.next == "run it with sudo"


MOUNTED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None)  # MS_REC | MS_PRIVATE
assert not libc.mount(b"vllmdiag", os.path.dirname(sys.argv[1]).encode(), b"tmpfs", 0, b"size=1m")
bind("XPUB", "ipc://" + sys.argv[1])
say("bound")
sys.stdin.read()
"""


@pytest.mark.needs("root", "unshare")
def test_a_path_of_another_mount_namespace_is_asked_there_however_long_it_is(children: Any, directory: Path) -> None:
    path = zmqs.ipc_path(directory / ("d" * (69 - len(str(directory)))))
    os.mkdir(os.path.dirname(path))
    pid = zmqs.start(children, MOUNTED, path, under=("unshare", "-m"))
    assert not os.path.exists(path)
    assert len(f"/proc/{pid}/root{path}") > 107
    (found,) = probed(zmqs.snapshot(pid))
    assert (found.outcome, found.socket_type) == ("ready", "XPUB")


ISOLATED = """
import fcntl, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
one = bind("PUB", "tcp://0.0.0.0:*")
two = bind("PULL", "ipc://" + sys.argv[1])
say("bound")
sys.stdin.read()
"""


@pytest.mark.needs("root", "unshare")
def test_endpoints_of_another_network_namespace_are_asked_there(children: Any, directory: Path) -> None:
    pid = zmqs.start(children, ISOLATED, zmqs.ipc_path(directory), under=("unshare", "-n"))
    found = probed(zmqs.snapshot(pid))
    assert sorted((p.outcome, p.socket_type) for p in found) == [("ready", "PUB"), ("ready", "PULL")]


@pytest.mark.needs("ipv6")
def test_a_wildcard_of_ipv6_is_asked_over_loopback(children: Any) -> None:
    pid = zmqs.start(children, "bind('PUB', 'tcp://[::]:*', IPV6=1); say('bound'); sys.stdin.read()")
    assert [p.outcome for p in probed(zmqs.snapshot(pid))] == ["ready"]


def test_what_was_not_reached_in_time_is_named(children: Any, directory: Path) -> None:
    pid, kinds = every_type(children, directory)
    found = probes.with_probes(zmqs.snapshot(pid), total_s=-1.0)
    assert [p.outcome for p in found.zmtp] == ["gated"] * len(kinds)
    assert found.costs[-1].note == "0 connections"


def test_what_will_be_done_is_said_before_it_is(children: Any, directory: Path) -> None:
    pid = zmqs.start(children, PLAIN, zmqs.ipc_path(directory))
    said: list[str] = []

    def hears(step: str) -> None:
        said.append(step)
        assert zmqs.only_listener(pid).recv_q == 0

    children.tell(pid, "hang up")
    probed(zmqs.snapshot(pid), hears)
    assert said == ["probing 1 ZMQ endpoints: one connection each, closed before the handshake is over"]


def test_only_zmq_listeners_of_members_are_candidates() -> None:
    def listener(local: str, family: str = "tcp", backlog: int = 100, pid: int = 1) -> Socket:
        owners = (SocketOwner(pid=pid),)
        return Socket(family=family, inode=7, state="LISTEN", local=local, recv_q=0, send_q=backlog, owners=owners)

    uuid = "6f1c1a1e-7a3b-4c5d-8e9f-0123456789ab"
    wanted = [listener(f"/tmp/{uuid}", "unix"), listener("127.0.0.1:5557"), listener("[::]:5557", "tcp6", 128)]
    others = [
        listener("127.0.0.1:8000", backlog=2048),  # HTTP
        listener("127.0.0.1:29500", backlog=4096),  # gloo, TCPStore, NCCL
        listener("127.0.0.1:6000", backlog=5),
        listener(f"@{uuid}", "unix"),
        listener(uuid, "unix"),
        listener("/tmp/vllm.sock", "unix"),
        listener(f"/tmp/{uuid}", "unix", pid=2),
        msgspec.structs.replace(listener(f"/tmp/{uuid}", "unix"), state="ESTAB"),
    ]
    assert probe_gates.candidates(wanted + others, {1}) == wanted

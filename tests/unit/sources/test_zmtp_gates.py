"""The gates of a probe: each refuses, says why, and nothing reaches the owner, who lives and serves on."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.sources import zmq_children as zmqs
from vllmdiag.model.process import Process
from vllmdiag.model.sockets import Socket, SocketOwner, ZmtpProbe
from vllmdiag.sources import probe_gates
from vllmdiag.sources.probe import probe, with_probes
from vllmdiag.sources.probe_gates import Refusal, libzmq_version
from vllmdiag.sources.sockets import SocketWatch
from vllmdiag.vllm.endpoints import FD_HEADROOM

ECHO = """
bound = bind("REP", "ipc://" + sys.argv[1])
say("bound")
while True:
    bound.send(bound.recv())
"""
CLIENT = """
import itertools
peer = context.socket(zmq.REQ)
peer.connect("ipc://" + sys.argv[1])
for line in itertools.chain(["hello"], sys.stdin):
    peer.send_string(line.strip())
    say(peer.recv_string() if peer.poll(20000) else None)
"""
AT_ITS_LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
bound = bind("REP", "ipc://" + sys.argv[1])
say("bound")
sys.stdin.readline()
leaked = []
try:
    while True:
        leaked.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    say(len(leaked))
while True:
    bound.send(bound.recv())
"""


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name, for the paths of sockets."""
    return tmp_path_factory.mktemp("z")


class Server:
    """A process that echoes over a ZMQ socket, and a client that is connected to it."""

    def __init__(self, children: Any, directory: Path) -> None:
        self._children = children
        self.path = zmqs.ipc_path(directory)
        self.pid = zmqs.start(children, ECHO, self.path)
        self.client = zmqs.start(children, CLIENT, self.path)
        self.listener = zmqs.only_listener(self.pid)
        (self.owner,) = zmqs.observed(self.pid)

    def probe(self, **owner: Any) -> ZmtpProbe:
        """Probe it, with some facts about its owner replaced."""
        return probe(self.listener, [msgspec.structs.replace(self.owner, **owner)], budget_s=60)

    def serves(self) -> bool:
        """Whether the client that was there before still gets its answer."""
        self._children.tell(self.client, "still there?")
        return bool(self._children.line(self.client) == '"still there?"')


@pytest.fixture
def server(children: Any, directory: Path) -> Server:
    return Server(children, directory)


@pytest.fixture
def untouched(server: Server) -> Iterator[None]:
    """Nothing was connected to the server within the test, and it serves afterwards."""
    before = zmqs.n_fds(server.pid)
    yield
    assert zmqs.only_listener(server.pid).recv_q == 0
    assert zmqs.n_fds(server.pid) == before
    assert server.serves()


def test_with_every_gate_open_it_is_probed_and_serves_on(server: Server) -> None:
    assert server.probe().outcome == "ready"
    assert server.serves()


@pytest.mark.parametrize(
    ("libraries", "words"),
    [
        ((), "which libzmq"),
        (("/usr/lib/libzmq.so.5",), "which libzmq"),
        (("/usr/lib/libzmq.so.5.3.0",), "which libzmq"),
        (("/opt/pyzmq.libs/libzmq-0a1b2c3d.so.5.2.2",), "libzmq 4.3.2"),
        (("/opt/pyzmq.libs/libzmq-0a1b2c3d.so.5.2.3",), "libzmq 4.3.3"),
        (("/opt/pyzmq.libs/libzmq-0a1b2c3d.so.5.2.5", "/usr/lib/libzmq.so.5.2.1"), "libzmq 4.3.1"),
        (("/opt/pyzmq.libs/libzmq-0a1b2c3d.so.5.2.5", "/usr/lib/libzmq.so.5"), "which libzmq"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_a_libzmq_that_would_lose_messages_or_is_not_known_is_not_probed(
    libraries: tuple[str, ...], words: str, server: Server
) -> None:
    found = server.probe(libraries=libraries)
    assert (found.outcome, found.took_s) == ("gated", None)
    assert words in found.reason
    assert found.next


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/v/lib/python3.12/site-packages/pyzmq.libs/libzmq-2f02442c.so.5.2.5", (4, 3, 5)),
        ("/usr/lib/x86_64-linux-gnu/libzmq.so.5.2.4", (4, 3, 4)),
        ("/opt/libzmq.so.5.2.12", (4, 3, 12)),
        ("/usr/lib/libzmq.so.5", None),
        ("/usr/lib/libzmq.so.5.1.5", None),
        ("/usr/lib/libczmq.so.5.2.5", None),
    ],
)
def test_the_release_of_libzmq_stands_in_the_name_of_its_file(path: str, version: tuple[int, ...] | None) -> None:
    assert libzmq_version(path) == version


def test_a_real_libzmq_is_known_by_its_file(server: Server) -> None:
    versions = [libzmq_version(path) for path in server.owner.libraries if "libzmq" in path]
    assert versions == [(4, 3, 5)]


@pytest.mark.usefixtures("untouched")
def test_a_process_that_has_the_pid_of_the_owner_is_not_probed(server: Server) -> None:
    found = server.probe(starttime=server.owner.starttime - 1)
    assert (found.outcome, found.reason) == ("gated", f"pid {server.pid} has ended")


@pytest.mark.usefixtures("untouched")
def test_without_an_owner_that_can_be_seen_nothing_is_probed(server: Server) -> None:
    assert probe(server.listener, []).reason == "who owns it cannot be seen"


def test_of_several_owners_all_must_pass(server: Server, children: Any) -> None:
    pid, _ = children.python("import sys; print('ready', flush=True); sys.stdin.read()")
    found = probe(server.listener, [server.owner, *zmqs.observed(pid)])
    assert found.reason.startswith(f"which libzmq pid {pid} runs")


def test_a_stopped_owner_is_not_probed_and_goes_on_when_it_is_continued(
    server: Server, eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    eventually(lambda: ") T " in Path(f"/proc/{server.pid}/stat").read_text())
    found = server.probe()
    assert (found.outcome, found.reason) == ("gated", f"pid {server.pid} is stopped (T): it would not accept")
    assert zmqs.only_listener(server.pid).recv_q == 0
    os.kill(server.pid, signal.SIGCONT)
    assert server.serves()


def test_one_that_waits_already_is_not_followed_by_a_probe(
    server: Server, eventually: Callable[[Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    eventually(lambda: ") T " in Path(f"/proc/{server.pid}/stat").read_text())
    monkeypatch.setattr(probe_gates, "_HALTED", {})  # that it is stopped would be reason enough
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(server.path)
        assert server.probe().reason == "1 connection waits to be accepted already"
        second.connect(server.path)
        assert server.probe().reason == "2 connections wait to be accepted already"
        assert zmqs.only_listener(server.pid).recv_q == 2
    os.kill(server.pid, signal.SIGCONT)
    assert server.serves()


def test_a_queue_that_cannot_be_seen_is_not_risked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = msgspec.structs.replace(server.listener, recv_q=None)
    monkeypatch.setattr(SocketWatch, "result", lambda _: ((blind,), ()))
    assert server.probe().reason == "how many connections wait to be accepted cannot be seen"


@pytest.mark.needs("root")
def test_another_user_cannot_pass_the_gates(server: Server, as_nobody: Any) -> None:
    found = as_nobody(server.probe)
    assert (found.outcome, found.reason) == (
        "gated",
        f"pid {server.pid} cannot be looked at: EACCES: the kernel refuses it to this user",
    )


# -- the limit of descriptors ---------------------------------------------------------------------------------------


def owner_at_its_limit(children: Any, directory: Path, eventually: Any) -> tuple[int, int]:
    """An owner that has all of its 256 descriptors in use, and a client that was connected before."""
    path = zmqs.ipc_path(directory)
    child = children.program(*zmqs.command(AT_ITS_LIMIT), path)
    assert children.line(child.pid)
    alone = zmqs.n_fds(child.pid)
    client = children.program(*zmqs.command(CLIENT), path)
    eventually(lambda: zmqs.n_fds(child.pid) > alone)  # afterwards there will be no descriptor left for it
    children.tell(child.pid, "fill")
    assert children.line(child.pid)
    assert children.line(client.pid) == '"hello"'
    return child.pid, client.pid


def test_an_owner_at_its_limit_is_refused_and_lives_and_serves(
    children: Any, directory: Path, eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, client = owner_at_its_limit(children, directory, eventually)
    look = zmqs.snapshot(pid)
    (found,) = with_probes(look).zmtp
    assert found.outcome == "gated"
    assert found.reason == f"the descriptor table of pid {pid} is nearly full (256 of 256): accepting could end it"
    assert found.next == f"ls -l /proc/{pid}/fd"
    children.tell(client, "still there?")
    assert children.line(client) == '"still there?"'
    assert zmqs.n_fds(pid) == 256
    # What the gate has spared it: one mere connection.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(zmqs.only_listener(pid).local)
        child = next(child for child in children.started if child.pid == pid)
        assert child.wait(timeout=60) == -signal.SIGABRT


def test_the_last_descriptor_that_may_be_used_and_the_first_that_may_not(tmp_path: Path) -> None:
    for used, refused in ((1024 - FD_HEADROOM, False), (1024 - FD_HEADROOM + 1, True)):
        owner, root = recorded(tmp_path / str(used), fds=used, limit="1024")
        found = probe_gates._owner_refusal(owner, root)
        assert (found is not None) == refused, found


# -- recorded trees ---------------------------------------------------------------------------------------------------


def recorded(  # one keyword for each thing that a gate looks at
    root: Path, *, state: str = "S", io_state: str = "S", fds: int = 3, limit: str = "1024", frozen: int = 0
) -> tuple[Process, str]:
    """An owner as /proc shows it, and the root of the tree that shows it."""
    home = root / "proc" / "77"
    for directory in (home / "fd", home / "task" / "77", home / "task" / "78", root / "proc" / "self"):
        directory.mkdir(parents=True)
    numbers = "1 1 1 0 -1 0 0 0 0 0 5 5 0 0 20 0 2 0 4242 1000 10"
    (home / "stat").write_text(f"77 (python) {state} {numbers}\n")
    (home / "task" / "77" / "stat").write_text(f"77 (python) {state} {numbers}\n")
    (home / "task" / "78" / "stat").write_text(f"78 (ZMQbg/IO/0) {io_state} {numbers}\n")
    (home / "limits").write_text(
        f"Limit  Soft Limit  Hard Limit  Units\nMax open files            {limit}   {limit}  files\n"
    )
    (home / "cgroup").write_text("0::/vllm\n")
    (root / "proc" / "self" / "mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = root / "sys" / "fs" / "cgroup" / "vllm"
    group.mkdir(parents=True)
    (group / "cgroup.events").write_text(f"populated 1\nfrozen {frozen}\n")
    for fd in range(fds):
        (home / "fd" / str(fd)).symlink_to("/dev/null")
    return Process(pid=77, starttime=4242, libraries=("/opt/libzmq-1.so.5.2.5",)), str(root)


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({"state": "T"}, "is stopped (T)"),
        ({"state": "t"}, "is stopped by a tracer (t)"),
        ({"state": "D"}, "is in an uninterruptible wait (D)"),
        ({"state": "Z"}, "is dead (Z)"),
        ({"state": "X"}, "is dead (X)"),
        ({"io_state": "D"}, "a ZMQ IO thread of pid 77 is in an uninterruptible wait (D)"),
        ({"frozen": 1}, "the control group of pid 77 is frozen"),
        ({"limit": "none"}, "the limit of open files of pid 77 is not known"),
        ({"fds": 62, "limit": "64"}, "nearly full (62 of 64)"),
    ],
)
def test_an_owner_that_does_not_run_or_has_no_room_is_refused(
    shown: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = probe_gates._owner_refusal(*recorded(tmp_path, **shown))
    assert found is not None
    assert words in found.reason


@pytest.mark.parametrize("shown", [{"state": "R"}, {"limit": "unlimited"}, {"io_state": "R"}])
def test_an_owner_that_runs_and_has_room_is_not_refused(shown: dict[str, Any], tmp_path: Path) -> None:
    assert probe_gates._owner_refusal(*recorded(tmp_path, **shown)) is None


@pytest.mark.parametrize("name", ["stat", "limits", "fd"])
def test_what_cannot_be_read_is_no_permission(name: str, tmp_path: Path) -> None:
    owner, root = recorded(tmp_path)
    os.rename(tmp_path / "proc" / "77" / name, tmp_path / name)
    found = probe_gates._owner_refusal(owner, root)
    assert found is not None
    assert found.reason.startswith("pid 77 cannot be looked at: ENOENT")


# -- what may be no ZMQ socket --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "refused"), [("100\n", True), ("128\n", False), ("4096\n", False), ("?\n", True)])
def test_where_every_backlog_is_that_of_zmq_the_backlog_proves_nothing(
    largest: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somaxconn").write_text(largest)
    monkeypatch.setattr(probe_gates, "_SOMAXCONN", str(tmp_path / "somaxconn"))
    owners = (SocketOwner(pid=os.getpid()),)
    listener = Socket(family="tcp", inode=7, state="LISTEN", local="127.0.0.1:5", recv_q=0, send_q=100, owners=owners)
    found = probe_gates._backlog_refusal(listener, os.getpid())
    assert isinstance(found, Refusal) == refused

"""Sockets of real processes: queues that grow, connections nobody accepted, ends nobody owns, other namespaces."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vllmdiag.model.base import Missing
from vllmdiag.model.sockets import Socket, SocketOwner
from vllmdiag.sources.socket_files import missing_ipc_paths
from vllmdiag.sources.sockets import SocketWatch, owners_of, with_owners

UNIX_SERVER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind({path!r})
listener.listen(3)
{then}
print("ready", flush=True)
{after}
sys.stdin.read()
"""
TCP_SERVER = """
import socket, sys
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(5)
print(listener.getsockname()[1], flush=True)
{after}
sys.stdin.read()
"""
ABSTRACT_PAIR = """
import ctypes, os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0pair")
listener.listen(3)
client = socket.socket(socket.AF_UNIX)
client.connect("\\0pair")
accepted = listener.accept()[0]
client.send(b"x" * 100)
tcp = socket.socket()
tcp.bind(("0.0.0.0", 4321))
tcp.listen(5)
if {nobody}:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable again, so that its own user may look
print("ready", flush=True)
sys.stdin.read()
"""


def watch(*pids: int, samples: int = 1, ports: tuple[int, ...] = ()) -> tuple[tuple[Socket, ...], tuple[Missing, ...]]:
    with closing(SocketWatch(pids, ports=ports)) as looking:
        for t in range(samples):
            looking.sample(float(t))
        return looking.result()


def test_the_queue_of_a_stopped_reader_grows_over_the_window(children: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "ipc")
    read = "accepted = listener.accept()[0]; print('accepted', flush=True)\nwhile accepted.recv(99): pass"
    pid, _ = children.python(UNIX_SERVER.format(path=path, then="", after=read))
    with socket.socket(socket.AF_UNIX) as writer, closing(SocketWatch([pid])) as looking:
        writer.connect(path)
        assert children.line(pid) == "accepted"
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        for t in (0.0, 1.0, 2.0):
            looking.sample(t)
            writer.send(b"x" * 1000)
        sockets, missing = looking.result()
        far = next(s for s in sockets if s.inode == os.fstat(writer.fileno()).st_ino)
        near = next(s for s in sockets if s.inode == far.peer_inode)
    assert missing == ()
    assert [(s.t, s.recv_q, s.state) for s in near.samples] == [
        (0.0, 0, "ESTAB"),
        (1.0, 1000, "ESTAB"),
        (2.0, 2000, "ESTAB"),
    ]
    assert far.samples[0].send_q < far.samples[1].send_q < far.samples[2].send_q
    assert (near.pids, near.local, far.pids, far.remote) == ((pid,), path, (), path)


def test_an_accepted_connection_shows_its_unread_bytes_its_path_and_its_owner(children: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "ipc")
    connected = f"client = socket.socket(socket.AF_UNIX); client.connect({path!r}); accepted = listener.accept()[0]"
    pid, _ = children.python(UNIX_SERVER.format(path=path, then=connected + "; client.send(b'x' * 50)", after=""))
    sockets, _ = watch(pid)
    accepted = next(s for s in sockets if s.local == path and s.state == "ESTAB")
    client = next(s for s in sockets if s.inode == accepted.peer_inode)
    assert (accepted.recv_q, client.remote, client.peer_inode) == (50, path, accepted.inode)
    assert [owner.pid for owner in accepted.owners] == [pid]
    for seen in (accepted, client):
        for fd in seen.owners[0].fds:
            assert os.readlink(f"/proc/{pid}/fd/{fd}") == f"socket:[{seen.inode}]"


def test_connections_nobody_accepted_are_seen_with_their_other_ends(children: Any) -> None:
    pid, port = children.python(TCP_SERVER.format(after=""))
    with socket.create_connection(("127.0.0.1", int(port))) as a, socket.create_connection(("127.0.0.1", int(port))):
        sockets, missing = watch(pid)
        listener = next(s for s in sockets if s.state == "LISTEN")
        assert (listener.recv_q, listener.send_q, listener.port, listener.pids) == (2, 5, int(port), (pid,))
        assert [(s.inode, s.owners) for s in sockets if s.port == int(port) and s.state == "ESTAB"] == [(0, ())] * 2
        assert os.fstat(a.fileno()).st_ino in [s.inode for s in sockets if s.remote_port == int(port)]
    assert missing == ()


def test_a_connection_keeps_its_identity_when_it_is_accepted_within_the_window(children: Any) -> None:
    accept = "sys.stdin.readline(); c = listener.accept(); print('accepted', flush=True)"
    pid, port = children.python(TCP_SERVER.format(after=accept))
    with socket.create_connection(("127.0.0.1", int(port))), closing(SocketWatch([pid])) as looking:
        looking.sample(0.0)
        before = next(s for s in looking.result()[0] if s.port == int(port) and s.remote)
        children.tell(pid, "accept")
        assert children.line(pid) == "accepted"
        looking.sample(1.0)
        after = next(s for s in looking.result()[0] if s.port == int(port) and s.remote)
    assert (before.inode, before.pids, len(before.samples)) == (0, (), 1)
    assert (after.remote, after.pids, len(after.samples)) == (before.remote, (pid,), 2)
    assert after.inode > 0


def test_an_answer_that_the_client_does_not_read_outlives_its_server_as_an_end_without_owner(
    children: Any, eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, port = children.python(
        TCP_SERVER.format(
            after="""
c = listener.accept()[0]
c.setblocking(False)
try:
    while True: c.send(b"x" * 100000)
except BlockingIOError:
    c.close()
"""
        )
    )
    with socket.create_connection(("127.0.0.1", int(port))) as client:

        def orphan() -> Socket | None:
            return next((s for s in watch(pid)[0] if s.port == int(port) and s.state == "FIN-WAIT-1"), None)

        end = eventually(orphan)
        reader = next(s for s in watch(pid)[0] if s.inode == os.fstat(client.fileno()).st_ino)
    assert (end.inode, end.owners) == (0, ())
    assert end.send_q > 0
    assert reader.recv_q is not None
    assert reader.recv_q > 0


def test_a_client_that_gave_up_leaves_a_close_wait_without_owner(
    children: Any, eventually: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, port = children.python(TCP_SERVER.format(after=""))
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        client.send(b"GET /health HTTP/1.1\r\n\r\n")
    ends = eventually(lambda: [s for s in watch(pid)[0] if s.state == "CLOSE-WAIT"])
    assert [(s.inode, s.port) for s in ends] == [(0, int(port))]


def test_sockets_of_other_processes_are_left_out_and_so_are_processes_that_are_gone(children: Any) -> None:
    with socket.socket() as unrelated:
        unrelated.bind(("127.0.0.1", 0))
        unrelated.listen()
        pid, _ = children.python("import sys; print('ready', flush=True); sys.stdin.read()")
        assert watch(pid) == ((), ())
        children.end(pid)
        assert watch(pid) == ((), ())


def test_a_named_port_matters_without_a_process() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(5)
        port = listener.getsockname()[1]
        assert [(s.state, s.port, s.owners) for s in watch(ports=(port,))[0]] == [("LISTEN", port, ())]


def test_the_process_at_the_other_end_is_found_on_the_whole_machine(children: Any) -> None:
    pid, port = children.python(TCP_SERVER.format(after="c = listener.accept()"))
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        inode = os.fstat(client.fileno()).st_ino
        sockets, _ = watch(pid)
        far = next(s for s in sockets if s.inode == inode)
        assert far.owners == ()
        owners, missing = owners_of([inode, 0])
        assert owners == {inode: (SocketOwner(pid=os.getpid(), fds=(client.fileno(),)),)}
        found = with_owners(sockets, owners)
    assert next(s for s in found if s.inode == inode).pids == (os.getpid(),)
    assert next(s for s in found if s.state == "LISTEN").pids == (pid,)
    assert missing is None


@pytest.mark.needs("root", "unshare")
def test_another_network_namespace_is_seen_with_peers_and_queues(children: Any) -> None:
    pid, _ = children.python(ABSTRACT_PAIR.format(nobody=False), under=["unshare", "-n"])
    sockets, missing = watch(pid)
    assert missing == ()
    assert {s.netns for s in sockets} == {os.stat(f"/proc/{pid}/ns/net").st_ino}
    assert os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    accepted = next(s for s in sockets if s.local == "@pair" and s.state == "ESTAB")
    assert accepted.recv_q == 100
    assert [s.port for s in sockets if s.family == "tcp"] == [4321]


@pytest.mark.needs("root", "unshare")
def test_without_privilege_another_namespace_is_seen_without_peers_and_that_is_said(
    children: Any, as_nobody: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, _ = children.python(ABSTRACT_PAIR.format(nobody=True), under=["unshare", "-n"])
    sockets, missing = as_nobody(lambda: watch(pid))
    assert [m.what for m in missing] == [f"peers and queues of unix sockets in the network namespace of pid {pid}"]
    assert missing[0].why.startswith("EPERM")
    listener = next(s for s in sockets if s.local == "@pair" and s.state == "LISTEN")
    assert (listener.pids, listener.recv_q, listener.send_q, listener.samples) == ((pid,), None, None, ())
    assert [(s.port, s.recv_q, s.send_q) for s in sockets if s.family == "tcp"] == [(4321, 0, None)]


@pytest.mark.needs("root")
def test_sockets_of_another_user_are_missing_but_a_named_port_is_still_seen(
    children: Any, as_nobody: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, port = children.python(TCP_SERVER.format(after=""))
    with socket.create_connection(("127.0.0.1", int(port))):
        sockets, missing = as_nobody(lambda: watch(pid, ports=(int(port),)))
    assert [m.what for m in missing] == [f"sockets of pid {pid}"]
    assert missing[0].why.startswith("EACCES")
    assert [(s.state, s.recv_q, s.send_q) for s in sockets if s.state == "LISTEN"] == [("LISTEN", 1, 5)]
    owners, hole = as_nobody(lambda: owners_of([s.inode for s in sockets]))
    assert owners == {}
    assert hole.what == "owners of peer sockets"


def recorded_address(address: str, port: int) -> str:
    return f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}:{port:04X}"


def test_a_recorded_tree_is_read_like_the_machine(tmp_path: Path) -> None:
    process = tmp_path / "proc" / "70"
    (process / "net").mkdir(parents=True)
    (process / "fd").mkdir()
    (process / "fd" / "5").symlink_to("socket:[900]")
    (process / "fd" / "9").symlink_to("socket:[901]")
    (process / "net" / "unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01   900 /tmp/ipc\n"
        "0000000000000000: 00000003 00000000 00000000 0001 03   777\n"
    )
    row = "{n}: {local} {remote} {state} 00000010:0000{queue} 00:00000000 00000000     0        0 {inode} 1 0 100 0\n"
    here, far = recorded_address("127.0.0.1", 8000), recorded_address("10.0.0.9", 5000)
    none = recorded_address("0.0.0.0", 0)
    (process / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        + row.format(n=0, local=here, remote=none, state="0A", queue="0003", inode=901)
        + row.format(n=1, local=here, remote=far, state="08", queue="0007", inode=0)
        + row.format(n=2, local=here, remote=far, state="06", queue="0000", inode=0)
    )
    looking = SocketWatch([70], root=str(tmp_path))
    looking.sample(0.0)
    sockets, missing = looking.result()
    assert missing == ()
    assert [(s.family, s.state, s.local, s.remote, s.recv_q, s.send_q, s.pids) for s in sockets] == [
        ("tcp", "LISTEN", "127.0.0.1:8000", "", 3, None, (70,)),
        ("tcp", "CLOSE-WAIT", "127.0.0.1:8000", "10.0.0.9:5000", 7, 16, ()),
        ("unix", "LISTEN", "/tmp/ipc", "", None, None, (70,)),
    ]


def test_a_recording_without_tables_says_so(tmp_path: Path) -> None:
    looking = SocketWatch([70], root=str(tmp_path))
    looking.sample(0.0)
    assert [m.what for m in looking.result()[1]] == ["sockets"]


def test_a_bound_path_that_was_removed_is_named_and_one_that_stands_is_not(children: Any, tmp_path: Path) -> None:
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    pids = [children.python(UNIX_SERVER.format(path=str(path), then="", after=""))[0] for path in (lost, kept)]
    lost.unlink()
    assert missing_ipc_paths(watch(*pids)[0]) == (str(lost),)


@pytest.mark.needs("root", "unshare", "mount")
def test_paths_are_looked_up_where_the_owner_would_look(children: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    mount = "import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', {directory!r}], check=True)\n"
    private = ["unshare", "-m"]
    first = mount.format(directory=str(theirs)) + UNIX_SERVER.format(path=str(theirs / "ipc"), then="", after="")
    covered = UNIX_SERVER.format(path=str(ours / "ipc"), then=mount.format(directory=str(ours)), after="")
    pids = [children.python(code, under=private)[0] for code in (first, covered)]
    assert not (theirs / "ipc").exists()
    assert (ours / "ipc").exists()
    assert missing_ipc_paths(watch(*pids)[0]) == (str(ours / "ipc"),)


def test_the_path_of_a_process_that_is_gone_proves_nothing() -> None:
    listener = Socket(family="unix", inode=1, state="LISTEN", local="/no/such/path", owners=(SocketOwner(pid=0),))
    assert missing_ipc_paths([listener]) == ()

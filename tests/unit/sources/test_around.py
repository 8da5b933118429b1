"""Ports that strangers hold, weights that are mapped, file systems, and known lines at the end of a log."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.process import Process
from vllmdiag.sources.logs import TAIL_BYTES, Logs, LogWatch
from vllmdiag.sources.mounts import filesystem_of, parse_mounts
from vllmdiag.sources.ports import taken_ports
from vllmdiag.sources.sockets import SocketWatch
from vllmdiag.sources.surroundings import beside_its_own
from vllmdiag.sources.weights import with_checkpoint
from vllmdiag.vllm.instances import Instance, Member
from vllmdiag.vllm.ports import wanted
from vllmdiag.vllm.serve_options import ServeOptions

SLEEP = "import sys; print('up',flush=True); sys.stdin.read()"
MAPS = (
    "import mmap,sys; f=open({path!r},'rb'); m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ); f.close();"
    "print('mapped',flush=True); sys.stdin.read()"
)
WRITES = "import sys; print('up',flush=True); sys.stdin.read()"


def test_a_stranger_on_a_wanted_port_is_named(children: Any) -> None:
    pid, _ = children.python(SLEEP)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        (taken,) = taken_ports({"HTTP": port}, None, [Process(pid=pid)])
        assert (taken.port, taken.purpose, taken.address) == (port, "HTTP", "127.0.0.1")
        assert os.getpid() in taken.pids
        assert taken.name
        assert taken_ports({"HTTP": port}, None, [Process(pid=os.getpid())]) == ()


SHARES = (
    "import socket,sys; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEPORT,1);"
    "s.bind(('127.0.0.1',{port})); s.listen(); print('up',flush=True); sys.stdin.read()"
)


def test_a_stranger_beside_a_server_on_its_port_is_named_and_a_server_alone_has_none(children: Any) -> None:
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", 0))
        own.listen()
        port, me = own.getsockname()[1], os.getpid()
        server = Instance(
            members=(Member(pid=me, role="APIServer", label="APIServer"),),
            roots=(me,),
            options=ServeOptions(port=port, host="127.0.0.1"),
        )

        def found() -> tuple[int, ...]:
            watch = SocketWatch([me])
            watch.sample(0.0)
            seen, _ = watch.result()
            watch.close()
            return tuple(p for t in beside_its_own([Process(pid=me)], server, seen).taken_ports for p in t.pids)

        assert found() == ()
        pid, _ = children.python(SHARES.format(port=port))
        assert found() == (pid,)


@pytest.mark.parametrize(("theirs", "ours", "collides"), [
    ("127.0.0.1", "127.0.0.1", True),
    ("127.0.0.1", "0.0.0.0", True),
    ("127.0.0.1", "127.0.0.2", False),
    ("0.0.0.0", "127.0.0.1", True),
    ("127.0.0.1", "a.name", True),
])  # fmt: skip
def test_listeners_on_different_addresses_do_not_collide(children: Any, theirs: str, ours: str, collides: bool) -> None:
    pid, _ = children.python(SLEEP)
    with socket.create_server((theirs, 0)) as stranger:
        found = taken_ports({"HTTP": stranger.getsockname()[1]}, ours, [Process(pid=pid)])
    assert bool(found) is collides


def test_only_ports_that_are_bound_here_and_fixed_are_wanted() -> None:
    assert wanted(ServeOptions(port=8000), {}) == {"HTTP": 8000}
    head = ServeOptions(nnodes=2, master_port=29501, data_parallel_size=2, data_parallel_size_local=1)
    assert wanted(head, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}) == {
        "HTTP": 8000, "master": 29501, "NIXL side channel": 5600,
    }  # fmt: skip
    assert wanted(ServeOptions(nnodes=2, node_rank=1, headless=True, master_port=29501), {}) == {}
    assert wanted(ServeOptions(uds="/x"), {}) == {}


def test_mapped_weights_show_how_far_the_loading_is(children: Any, tmp_path: Path) -> None:
    for number, size in enumerate((1000, 5000, 3000), start=1):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").write_bytes(bytes(size))
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    pid, _ = children.python(MAPS.format(path=str(tmp_path / "model-00002-of-00003.safetensors")))
    seen = with_checkpoint(Process(pid=pid)).checkpoint
    assert seen is not None
    assert (seen.files, seen.bytes, seen.before, seen.size) == (3, 9000, 1000, 5000)
    assert seen.path.endswith("model-00002-of-00003.safetensors")
    assert seen.filesystem == filesystem_of(pid, str(tmp_path))


def test_a_process_without_weights_has_no_checkpoint(children: Any) -> None:
    pid, _ = children.python(SLEEP)
    assert with_checkpoint(Process(pid=pid)).checkpoint is None
    assert with_checkpoint(Process(pid=2**22 + 1)).checkpoint is None


def test_the_file_system_of_a_path_is_that_of_its_nearest_mount() -> None:
    assert filesystem_of(os.getpid(), "/proc/self") == "proc"
    assert filesystem_of(2**22 + 1, "/") == ""
    assert parse_mounts("srv:/a /data\\040x nfs4 rw 0 0\nbroken\n") == [("/data x", "nfs4")]


@given(st.text())
def test_any_mount_table_is_read_without_an_error(text: str) -> None:
    assert isinstance(parse_mounts(text), list)


def test_known_lines_of_a_log_are_kept_and_nothing_else(children: Any, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    known = "(EngineCore pid=7) ERROR EngineCore failed to start."
    shards = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]"
    with log.open("w") as out:
        pid, _ = _writer(children, out)
        out.write("a" * TAIL_BYTES + f"\n{known}\nThe secret prompt of a user\n{shards}\rnothing\n")
        out.flush()
        lines, digests = _logs(pid)
    assert [line.text for line in lines] == [known, shards]
    assert {(line.file, line.number) for line in lines} == {(str(log), 0)}
    assert [d.first_error.kind for d in digests if d.first_error] == ["engine_failed_start"]


def _writer(children: Any, out: Any) -> tuple[int, str]:
    """A process whose stderr is the log; its stdout tells us that it is up."""
    found: tuple[int, str] = children.python(WRITES, stderr=out)
    return found


def test_a_log_that_is_a_pipe_is_not_read(children: Any) -> None:
    pid, _ = children.python(SLEEP)
    assert _logs(pid) == ((), ())


def _logs(pid: int) -> Logs:
    watch = LogWatch([Process(pid=pid)])
    try:
        return watch.read()
    finally:
        watch.close()


def test_what_a_process_has_said_last_is_read_after_its_end(children: Any, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with log.open("w") as out:
        pid, _ = _writer(children, out)
        watch = LogWatch([Process(pid=pid)])
        out.write("(EngineCore pid=7) ERROR 07-02 03:11:20 [core.py:9] EngineCore encountered a fatal error.\n")
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass  # our child: it stays a zombie until the fixture reaps it
    log.unlink()
    (digest,) = watch.read().logs
    watch.close()
    assert digest.file == str(log)
    assert digest.failed

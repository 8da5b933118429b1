"""Who makes shared memory removes it, and nobody else, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import zmq

from vllmdiag.model.ring import Geometry
from vllmdiag.refqueue import MessageQueue, errors, fence, segment
from vllmdiag.refqueue.ring import ShmRingBuffer
from vllmdiag.refqueue.segment import Segment

ROOT = Path(__file__).resolve().parents[3]
GEOMETRY = Geometry(chunks=3, chunk_bytes=64, n_readers=2)

ATTACH = """
import sys
import tempfile
from vllmdiag.refqueue.segment import Segment
held = Segment.attach(sys.argv[1], int(sys.argv[2]))
held.data[0] = 42
print("attached", flush=True)
"""

CREATE = """
import sys
import tempfile
from vllmdiag.refqueue import MessageQueue
queue = MessageQueue(1, 1, max_chunk_bytes=64)
print(queue.ring.name, flush=True)
sys.stdin.read()
"""


def exists(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def python(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.fixture
def made() -> Iterator[Segment]:
    held = Segment.create(4096)
    yield held
    held.close()


def test_a_reader_that_ends_leaves_the_segment_and_says_nothing(made: Segment) -> None:
    for _ in range(2):
        reader = python(ATTACH, made.name, "4096")
        out, err = reader.communicate(timeout=60)
        assert (out, err, reader.returncode) == ("attached\n", "", 0)
    assert exists(made.name)
    assert made.data[0] == 42


def test_spawned_readers_do_not_break_the_tracker_they_share(tmp_path: Path) -> None:
    program = tmp_path / "family.py"
    program.write_text(
        "import multiprocessing\n"
        "from vllmdiag.refqueue.segment import Segment\n"
        "def child(name):\n"
        "    Segment.attach(name, 4096).close()\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    held = Segment.create(4096)\n"
        "    for _ in range(2):\n"
        "        process = spawn.Process(target=child, args=(held.name,))\n"
        "        process.start()\n"
        "        process.join()\n"
        "    held.close()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_creator_removes_the_segment_and_its_sockets_and_twice_does_no_harm() -> None:
    queue = MessageQueue(1, 1)
    handle = queue.export_handle()
    assert handle.buffer_handle is not None
    addresses = (handle.local_subscribe_addr, handle.local_notify_addr)
    files = [Path("/dev/shm", handle.buffer_handle[3]), *(Path(str(a).removeprefix("ipc://")) for a in addresses)]
    assert [file.exists() for file in files] == [True] * 3
    queue.close()
    queue.close()
    assert [file.exists() for file in files] == [False] * 3


def test_a_queue_that_cannot_be_set_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mapped = Path("/proc/self/maps").read_text().count("/dev/shm/psm_")
    with pytest.raises(zmq.ZMQError):
        MessageQueue(2, 1, connect_ip="192.0.2.1")  # nobody's address
    assert list(tmp_path.iterdir()) == []
    assert Path("/proc/self/maps").read_text().count("/dev/shm/psm_") == mapped


@pytest.mark.parametrize("end", [lambda p: p.stdin.close(), lambda p: p.kill()], ids=["exit", "kill -9"])
def test_however_the_creator_ends_the_segment_goes(end: Callable[[subprocess.Popen[str]], None]) -> None:
    # A killed creator leaves the files of its sockets, as vLLM's does. (Their paths may not be as long as tmp_path.)
    with tempfile.TemporaryDirectory() as directory, python(CREATE, TMPDIR=directory) as creator:
        assert creator.stdout is not None
        assert creator.stderr is not None
        name = creator.stdout.readline().strip()
        assert exists(name)
        end(creator)
        creator.stderr.read()  # held open by the tracker too: ends when both have
    assert not exists(name)


def test_a_forked_child_that_closes_what_it_inherited_takes_nothing_away() -> None:
    with MessageQueue(1, 1) as queue:
        assert queue.ring is not None
        pid = os.fork()
        if pid == 0:
            queue.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert exists(queue.ring.name)
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.enqueue("works")
            assert reader.dequeue(60) == "works"


def test_a_segment_that_somebody_else_removed_is_closed_without_a_word() -> None:
    creator = python(CREATE)
    assert creator.stdout is not None
    os.unlink(f"/dev/shm/{creator.stdout.readline().strip()}")
    _, err = creator.communicate(timeout=60)
    assert (err, creator.returncode) == ("", 0)


def test_a_killed_reader_leaves_the_ring_to_the_others() -> None:
    with MessageQueue(2, 2) as queue:
        assert queue.ring is not None
        reader = python(ATTACH + "sys.stdin.read()", queue.ring.name, str(queue.ring.geometry.size))
        assert reader.stdout is not None
        reader.stdout.readline()
        reader.send_signal(signal.SIGKILL)
        reader.communicate(timeout=60)
        assert exists(queue.ring.name)


def test_attaching_to_what_is_not_there_is_a_typed_error() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Segment.attach("psm_not_there", 4096)
    assert isinstance(caught.value, errors.NoSegmentError)


@pytest.mark.parametrize("size", [4095, 4097, 8192, 1])
def test_attaching_to_a_segment_of_another_size_is_a_typed_error(made: Segment, size: int) -> None:
    with pytest.raises(errors.WrongSizeError):
        Segment.attach(made.name, size)


def test_attaching_to_an_empty_file_is_a_typed_error() -> None:
    path = Path(f"/dev/shm/vllmdiag-test-{os.getpid()}")
    path.touch()
    try:
        with pytest.raises(errors.WrongSizeError):
            Segment.attach(path.name, 4096)
    finally:
        path.unlink()


def test_attaching_to_a_segment_that_is_no_ring_is_a_typed_error() -> None:
    other = shared_memory.SharedMemory(create=True, size=GEOMETRY.size)
    try:
        assert other.buf is not None
        other.buf[:] = b"\xff" * GEOMETRY.size
        with pytest.raises(errors.NotARingError):
            ShmRingBuffer(GEOMETRY, other.name)
        with ring() as sound:
            for wrong in ({"chunks": 4}, {"n_readers": 1}):
                shape = Geometry(**{"chunks": 3, "chunk_bytes": 64, "n_readers": 2, **wrong})
                with pytest.raises(errors.WrongSizeError):
                    ShmRingBuffer(shape, sound.name)
    finally:
        other.close()
        other.unlink()


def test_a_ring_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm")
    before = len(os.listdir("/dev/shm"))
    with pytest.raises(errors.NoSpaceError, match="no room"):
        Segment.create(free.f_frsize * free.f_bavail + (1 << 30))
    assert len(os.listdir("/dev/shm")) <= before + 1  # others may come, but no segment of ours
    monkeypatch.setattr(segment, "SHM_DIR", str(tmp_path / "none"))
    Segment.create(64).close()


class ring:  # noqa: N801 - reads like contextlib.closing
    """A ring, closed at the end."""

    def __enter__(self) -> ShmRingBuffer:
        self.made = ShmRingBuffer(GEOMETRY)
        return self.made

    def __exit__(self, *_: object) -> None:
        self.made.close()


class Recorder:
    """A row of flags that notes in which order it is written to, and where the fences stand."""

    def __init__(self, row: memoryview, log: list[str]) -> None:
        self.row, self.log = row, log

    def __setitem__(self, flag: int, value: int) -> None:
        self.log.append(f"{('written' if flag == 0 else f'reader {flag - 1}')}={value}")
        self.row[flag] = value

    def __getitem__(self, flag: int) -> int:
        return self.row[flag]


def test_flags_are_written_in_the_order_that_the_protocol_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("vllmdiag.refqueue.ring.order_fence", lambda: log.append("order"))
    monkeypatch.setattr("vllmdiag.refqueue.ring.full_fence", lambda: log.append("full"))
    with ring() as made:
        row = made._rows[1]
        made._rows[1] = Recorder(row, log)  # type: ignore[call-overload]
        made.begin_write(1)
        made.data(1)[0] = 1
        made.publish(1)
        assert log == ["written=0", "order", "reader 0=0", "reader 1=0", "order", "written=1", "full"]
        log.clear()
        made.mark_read(1, 1)
        assert log == ["order", "reader 1=1", "full"]
        made._rows[1] = row


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_every_machine_has_a_full_fence(machine: str) -> None:
    order, full = fence.choose(machine)
    order()
    full()
    assert full is fence.by_lock if machine == "x86_64" else order is full
    assert (fence.by_libatomic() or fence.by_lock)() is None

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process
from vllmdiag.model.shm import Segment
from vllmdiag.sources import proc, shm
from vllmdiag.sources.observe import observe

SIZE = 10 * (1 << 20) + 30
HOLD = """
import mmap, os, sys, time
path = {path!r}
first = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(first, {size})
view = mmap.mmap(first, {size})
second = os.dup(first)
for fd in {close}:
    os.close((first, second)[fd])
if {forget}:
    view.close()
print('ready', flush=True)
time.sleep(600)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/vllmdiag-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def hold(path: Path | str, *, close: tuple[int, ...] = (), forget: bool = False, size: int = SIZE) -> str:
    """Code of a process that creates the sparse file, keeps two descriptors and maps it."""
    return HOLD.format(path=str(path), size=size, close=close, forget=forget)


def observed(pid: int) -> Process:
    return observe(next(process for process in proc.scan() if process.pid == pid))


def at(segments: list[Segment], path: Path | str) -> Segment:
    (segment,) = [segment for segment in segments if segment.path == str(path)]
    return segment


def test_a_segment_is_known_with_its_holder_and_every_descriptor(children: Any, path: Path) -> None:
    pid, _ = children.python(hold(path))
    segment = at(shm.segments([observed(pid)]), path)
    status = path.stat()
    assert segment.key == (status.st_dev, status.st_ino)
    assert (segment.size, segment.resident, segment.uid) == (SIZE, 0, os.geteuid())
    assert not segment.deleted
    assert segment.mtime_age_s is not None
    (holder,) = segment.holders
    # Its own two, and the one that Python's mmap duplicates.
    assert (holder.pid, len(holder.fds)) == (pid, 3)
    assert holder.mapped in (None, True)
    (holder,) = at(shm.segments([observed(pid)], maps=True), path).holders
    assert holder.mapped is True


def test_an_inherited_descriptor_without_a_mapping_is_told_from_one_with(children: Any, path: Path) -> None:
    mapper, _ = children.python(hold(path))
    opener, _ = children.python(hold(path, forget=True, close=(1,)))
    holders = at(shm.segments([observed(mapper), observed(opener)], maps=True), path).holders
    assert {holder.pid: holder.mapped for holder in holders} == {mapper: True, opener: False}


def test_a_mapping_without_a_descriptor_is_a_holder_too(children: Any, path: Path) -> None:
    code = f"""
import ctypes, os, time
fd = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mmap(None, 4096, 1, 1, fd, 0)
os.close(fd)
print('ready', flush=True)
time.sleep(600)
"""
    pid, _ = children.python(code)
    (holder,) = at(shm.segments([observed(os.getpid())]), path).holders
    assert (holder.pid, holder.fds, holder.mapped) == (pid, (), True)


def test_a_segment_that_nobody_holds_has_no_holder(path: Path) -> None:
    path.write_bytes(b"x" * 5000)
    segment = at(shm.segments([observed(os.getpid())]), path)
    assert segment.holders == ()
    assert segment.resident == 8192


def test_a_deleted_segment_lives_on_through_its_holders(children: Any, path: Path) -> None:
    pid, _ = children.python(hold(path))
    path.unlink()
    segment = at(shm.segments([observed(pid)]), path)
    assert segment.deleted
    assert segment.size == SIZE
    assert [holder.pid for holder in segment.holders] == [pid]
    path.write_bytes(b"another")
    paths = [segment.deleted for segment in shm.segments([observed(pid)]) if segment.path == str(path)]
    assert sorted(paths) == [False, True]


@pytest.mark.needs("root", "unshare", "mount")
def test_each_mount_namespace_has_its_own_segments_and_capacity(children: Any, path: Path) -> None:
    inside = f"/dev/shm/vllmdiag-inside-{os.getpid()}"
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'
    there, _ = children.python(hold(inside, size=64 << 20), under=("unshare", "--mount", "sh", "-c", script))
    here, _ = children.python(hold(path))
    processes = [observed(here), observed(there)]
    segments = shm.segments(processes)
    assert [holder.pid for holder in at(segments, inside).holders] == [there]
    assert [holder.pid for holder in at(segments, path).holders] == [here]
    assert not Path(inside).exists()
    capacity = {mount.pids: mount.size for mount in shm.mounts(processes)}
    assert capacity[there,] == 1 << 20
    status = os.statvfs("/dev/shm")
    assert capacity[here,] == status.f_frsize * status.f_blocks


@pytest.mark.needs("root")
def test_an_unreadable_process_makes_the_holders_incomplete(children: Any, path: Path, as_nobody: Any) -> None:
    pid, _ = children.python(hold(path))
    path.chmod(0o644)
    segment = at(shm.segments([observed(pid)]), path)
    assert [holder.pid for holder in segment.holders] == [pid]

    def looked_at_by_nobody() -> shm.Holders:
        return shm.all_holders([segment.key])

    holders = as_nobody(looked_at_by_nobody)
    assert holders.by_key == {segment.key: ()}
    assert not holders.complete


def test_a_process_whose_descriptors_are_missing_is_no_error(children: Any, path: Path) -> None:
    pid, _ = children.python(hold(path))
    hole = Missing(what="descriptors", why="EACCES", next="")
    blind = msgspec.structs.replace(observed(pid), shm_fds=hole, namespaces=hole)
    assert shm.segments([blind]) == []
    assert shm.mounts([blind]) == []


def test_without_files_no_process_is_asked() -> None:
    assert shm.all_holders([]) == shm.Holders({}, complete=True)


def test_looking_allocates_nothing_and_leaves_the_times_alone(children: Any, path: Path) -> None:
    pid, _ = children.python(hold(path))
    before = path.stat()
    shm.segments([observed(pid)], maps=True)
    after = path.stat()
    assert after.st_blocks == 0
    assert (after.st_mtime_ns, after.st_atime_ns) == (before.st_mtime_ns, before.st_atime_ns)

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmdiag.acts.clean import remove_orphans
from vllmdiag.model.view import SegmentView


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file in the real /dev/shm that nobody holds."""
    path = Path("/dev/shm") / f"vllmdiag-test-{secrets.token_hex(6)}"
    path.write_bytes(b"\0" * 8192)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A tree in which this process is the only one: elsewhere a process that may not be read could hold the file."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    for name in (str(os.getpid()), "self"):
        (tmp_path / "proc" / name).symlink_to(f"/proc/{os.getpid()}")
    (tmp_path / "dev" / "shm").symlink_to("/dev/shm")
    return str(tmp_path)


def _seen(path: Path, *, orphan: bool = True, removable: bool = True, ino: int | None = None) -> SegmentView:
    status = path.stat()
    return SegmentView(
        name=path.name,
        kind="broadcast ring",
        size=status.st_size,
        orphan=orphan,
        removable=removable,
        path=str(path),
        dev=status.st_dev,
        ino=status.st_ino if ino is None else ino,
    )


def test_what_nobody_holds_is_removed_and_its_bytes_counted(root: str, segment: Path) -> None:
    (removal,) = remove_orphans([_seen(segment)], root)
    assert (removal.removed, removal.freed, segment.exists()) == (True, 8192, False)


@pytest.mark.parametrize("orphan_removable", [(False, True), (True, False)])
def test_what_is_no_removable_orphan_is_not_touched(
    root: str, segment: Path, orphan_removable: tuple[bool, bool]
) -> None:
    orphan, removable = orphan_removable
    assert remove_orphans([_seen(segment, orphan=orphan, removable=removable)], root) == []
    assert segment.exists()


def test_what_has_been_opened_since_is_kept(root: str, segment: Path) -> None:
    seen = _seen(segment)
    with segment.open("rb"):
        (removal,) = remove_orphans([seen], root)
    assert (removal.removed, removal.why) == (False, f"held by pid {os.getpid()} now")
    assert segment.exists()


def test_what_is_mapped_without_a_descriptor_is_kept(root: str, segment: Path) -> None:
    # Python's mmap keeps a descriptor of its own, so the mapping is made by hand.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    seen = _seen(segment)
    fd = os.open(segment, os.O_RDONLY)
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    try:
        (removal,) = remove_orphans([seen], root)
    finally:
        libc.munmap(address, 4096)
    assert (removal.removed, removal.why) == (False, f"held by pid {os.getpid()} now")
    assert segment.exists()


def test_a_name_that_belongs_to_another_file_now_is_kept(root: str, segment: Path) -> None:
    seen = _seen(segment)
    keep_the_inode = segment.with_name(segment.name + "-old")
    segment.rename(keep_the_inode)
    try:
        segment.write_bytes(b"new")
        (removal,) = remove_orphans([seen], root)
        assert (removal.removed, removal.why) == (False, "the name belongs to another file now")
        assert segment.read_bytes() == b"new"
    finally:
        keep_the_inode.unlink()


def test_what_has_gone_meanwhile_is_told(root: str, segment: Path) -> None:
    seen = _seen(segment)
    segment.unlink()
    (removal,) = remove_orphans([seen], root)
    assert (removal.removed, removal.why) == (False, "gone already")


def test_nothing_is_removed_while_a_process_cannot_be_asked(root: str, segment: Path) -> None:
    # A process without readable maps and descriptors, as another user's is to us.
    (Path(root) / "proc" / "1").mkdir()
    (Path(root) / "proc" / "1" / "maps").symlink_to("maps")
    (Path(root) / "proc" / "1" / "fd").symlink_to("fd")
    (removal,) = remove_orphans([_seen(segment)], root)
    assert (removal.removed, removal.why) == (False, "some processes cannot be asked whether they hold it")
    assert segment.exists()

"""Files of /dev/shm as each mount namespace sees them, deleted ones that are still held, and who holds them.

Nothing is opened for writing and nothing is mapped: a mapping of a hole allocates its pages (tmpfs files are sparse).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process, ShmFd
from vllmdiag.model.shm import Holder, Segment, ShmMount

from . import deadline, procfs
from .fds import SHM_DIRECTORY, read_links
from .viewer import sees_all_pids

Key = tuple[int, int]
"""(device, inode): identity of a file across mount namespaces."""

_SHARED_MAP = re.compile(rb"^\S+ ..?.?s \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)", re.MULTILINE)


class Holders(NamedTuple):
    """Who holds each file. `complete` is False when some process could not be asked: absence then proves nothing."""

    by_key: dict[Key, tuple[Holder, ...]]
    complete: bool


def segments(processes: Collection[Process], root: str = "/", *, maps: bool = False) -> list[Segment]:
    """Every file of /dev/shm that the processes see or hold, with its holders on the whole machine; sorted by path.

    Args:
        processes: observed ones; their `shm_fds` and mount namespaces say where to look.
        root: where the tree with ``proc`` is.
        maps: also say of every holder among `processes` whether it has the file mapped.
    """
    found = _listed(processes, root)
    for process in processes:
        for fd in () if isinstance(process.shm_fds, Missing) else process.shm_fds:
            if (fd.dev, fd.ino) not in found:
                found[fd.dev, fd.ino] = _from_fd(process.pid, fd, root)
    held = all_holders(found, root, ask_maps_of=[process.pid for process in processes] if maps else ())
    return [
        msgspec.structs.replace(segment, holders=held.by_key[segment.key], holders_complete=held.complete)
        for segment in sorted(found.values(), key=lambda segment: (segment.path, segment.key))
    ]


def all_holders(keys: Collection[Key], root: str = "/", *, ask_maps_of: Collection[int] = ()) -> Holders:
    """Every visible process that holds one of the files.

    Descriptors of all processes are read. Memory maps cost more: they are read of the pids in `ask_maps_of`, and of all
    processes when a file has no holder otherwise, because one that is mapped needs no descriptor.
    """
    wanted = frozenset(keys)
    if not wanted:
        return Holders({}, complete=True)
    pids = procfs.pids(root)
    complete = sees_all_pids(root)
    if complete and not _may_be_asked(1, root) and _is_machine_init(root):
        pids = [pid for pid in pids if pid != 1]
    fds: dict[Key, dict[int, list[int]]] = {key: {} for key in wanted}
    for pid in pids:
        held, readable = _held_fds(pid, root)
        complete = complete and readable
        for fd, key in held:
            if key in wanted:
                fds[key].setdefault(pid, []).append(fd)
    mapped: dict[int, frozenset[Key]] = {}
    complete = _ask_maps([pid for pid in pids if pid in ask_maps_of], root, mapped) and complete
    if any(not fds[key] and not any(key in keys for keys in mapped.values()) for key in wanted):
        complete = _ask_maps([pid for pid in pids if pid not in ask_maps_of], root, mapped) and complete
    by_key = {}
    for key in wanted:
        holders = sorted(fds[key].keys() | {pid for pid, keys in mapped.items() if key in keys})
        by_key[key] = tuple(
            Holder(pid=pid, fds=tuple(fds[key].get(pid, ())), mapped=key in mapped[pid] if pid in mapped else None)
            for pid in holders
        )
    return Holders(by_key, complete)


def mounts(processes: Collection[Process], root: str = "/") -> list[ShmMount]:
    """Capacity of /dev/shm for each mount namespace among the processes; one that cannot be reached is left out."""
    found = []
    for mnt_ns, members in _by_mount_namespace(processes).items():
        pids = tuple(sorted(process.pid for process in members))
        for directory in _shm_directories(pids, root):
            try:
                # On the path through /proc/PID/root: df and friends would show our own mount instead.
                capacity = os.statvfs(directory)
            except OSError:
                continue
            found.append(
                ShmMount(
                    mnt_ns=mnt_ns,
                    path=SHM_DIRECTORY.rstrip("/"),
                    size=capacity.f_frsize * capacity.f_blocks,
                    free=capacity.f_frsize * capacity.f_bavail,
                    pids=pids,
                )
            )
            break
    return found


def _by_mount_namespace(processes: Iterable[Process]) -> dict[int, list[Process]]:
    spaces: dict[int, list[Process]] = {}
    for process in processes:
        if process.namespaces is not None and not isinstance(process.namespaces, Missing):
            spaces.setdefault(process.namespaces.mnt, []).append(process)
    return spaces


def _shm_directories(pids: Iterable[int], root: str) -> Iterator[str]:
    return (procfs.proc(root, pid, "root", SHM_DIRECTORY.strip("/")) for pid in pids)


def _listed(processes: Iterable[Process], root: str) -> dict[Key, Segment]:
    """The files that have a name, through the first process of each mount namespace whose directory opens."""
    found: dict[Key, Segment] = {}
    for members in _by_mount_namespace(processes).values():
        for directory in _shm_directories((process.pid for process in members), root):
            try:
                names = os.listdir(directory)
            except OSError:
                continue
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    seen = os.lstat(f"{directory}/{name}")
                    if stat.S_ISREG(seen.st_mode):
                        found[seen.st_dev, seen.st_ino] = _segment(SHM_DIRECTORY + name, seen)
            break
    return found


def _from_fd(pid: int, fd: ShmFd, root: str) -> Segment:
    """A file that is only known by a descriptor: deleted, or in a directory that could not be listed."""
    try:
        seen = os.stat(procfs.proc(root, pid, "fd", fd.fd))
    except OSError:
        seen = None
    if seen is None or (seen.st_dev, seen.st_ino) != (fd.dev, fd.ino):  # closed since
        return Segment(path=fd.path, dev=fd.dev, ino=fd.ino, size=fd.size, deleted=fd.deleted)
    return _segment(fd.path, seen, deleted=fd.deleted)


def _segment(path: str, seen: os.stat_result, *, deleted: bool = False) -> Segment:
    return Segment(
        path=path,
        dev=seen.st_dev,
        ino=seen.st_ino,
        size=seen.st_size,
        resident=seen.st_blocks * 512,
        deleted=deleted,
        uid=seen.st_uid,
        mtime_age_s=max(0.0, time.time() - seen.st_mtime),
    )


def _may_be_asked(pid: int, root: str) -> bool:
    try:
        read_links(pid, root)
    except OSError as error:
        return error.errno in procfs.GONE
    return True


def _is_machine_init(root: str) -> bool:
    """PID 1 is the init of the machine, not a server that runs as PID 1 of its container.

    Init may have more capabilities than root has, and then nobody can read what it holds. It makes no segments of
    Python, so it is left out of the proof; where PID 1 is a Python, or its name cannot be read, it is not.
    """
    try:
        name = procfs.text(procfs.proc(root, 1, "comm")).strip()
    except OSError:
        return False
    return not name.startswith(("python", "pypy", "vllm", "VLLM"))


def _held_fds(pid: int, root: str) -> tuple[list[tuple[int, Key]], bool]:
    """Descriptors of one process that lead into /dev/shm, and whether they could be read."""
    held = []
    try:
        for fd, link in read_links(pid, root):
            if link.startswith(SHM_DIRECTORY):
                with contextlib.suppress(FileNotFoundError):
                    seen = os.stat(procfs.proc(root, pid, "fd", fd))
                    held.append((fd, (seen.st_dev, seen.st_ino)))
    except OSError as error:
        return held, error.errno in procfs.GONE
    return held, True


def _ask_maps(pids: Sequence[int], root: str, mapped: dict[int, frozenset[Key]]) -> bool:
    """Add the files that each process maps shared; False when one could not be asked."""
    complete = True
    for pid, answer in zip(pids, deadline.each(partial(_shared_maps, root), pids), strict=True):
        if isinstance(answer, OSError):
            complete = complete and answer.errno in procfs.GONE
        else:
            rows = (row.split() for row in answer.decode("ascii").splitlines())
            mapped[pid] = frozenset(
                (os.makedev(int(major, 16), int(minor, 16)), int(ino)) for major, minor, ino in rows
            )
    return complete


def _shared_maps(root: str, pid: int) -> bytes:
    found = _SHARED_MAP.findall(procfs.read(procfs.proc(root, pid, "maps")))
    return b"\n".join(sorted({b" ".join(row) for row in found}))

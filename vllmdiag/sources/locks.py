"""Locks on files of caches: who holds them by /proc/locks, and lock files that are locks by their mere existence.

filelock (used by torch, triton, flashinfer, Hugging Face) takes flock(2) and polls, so one that waits does not show in
/proc/locks; the holder does. torch's FileBaton creates a file ``lock`` and removes it: the holder has it open, and one
that was killed leaves it behind for ever.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from vllmdiag.model.process import Process
from vllmdiag.model.startup import FileLock
from vllmdiag.vllm.stages import is_lock_file

from . import deadline, procfs
from .fds import read_links
from .proc import parse_stat

_ROW = re.compile(
    r"^(?P<id>\d+): (?P<blocked>-> )*(?P<kind>\w+)\s+\S+\s+\S+\s+(?P<pid>-?\d+) [0-9a-f]+:[0-9a-f]+:(?P<ino>\d+) "
)
_MAX_BATONS = 200


class Row(NamedTuple):
    """One line of /proc/locks."""

    kind: str
    pid: int
    ino: int
    waits: bool
    """It is not held but waited for."""


def parse_locks(text: str) -> list[Row]:
    """The lines of /proc/locks; those of another form (leases) are left out."""
    found = (_ROW.match(line) for line in text.splitlines())
    return [Row(m["kind"], int(m["pid"]), int(m["ino"]), m["blocked"] is not None) for m in found if m]


def file_locks(processes: Sequence[Process], root: str = "/") -> tuple[FileLock, ...]:
    """Locks on files that are named like locks of a cache, whoever holds them; by path. Never raises.

    Args:
        processes: of the instance: they tell where its caches are.
        root: where /proc is looked up.
    """
    try:
        rows = parse_locks(procfs.text(procfs.proc(root, "locks")))
    except OSError:
        rows = []
    held = {row.ino: row for row in rows if not row.waits}
    waiting: dict[int, list[int]] = {}
    for row in rows:
        if row.waits:
            waiting.setdefault(row.ino, []).append(row.pid)
    found = []
    for ino, row in held.items():
        path = _path_of(row.pid, ino, root)
        if path is not None:
            found.append(_lock(row, path, waiting.get(ino, []), root))
    return tuple(sorted((*found, *_batons(processes, root)), key=lambda lock: lock.path))


def _lock(row: Row, path: tuple[str, float], waiters: list[int], root: str) -> FileLock:
    comm, state = _comm_and_state(row.pid, root)
    name, age_s = path
    return FileLock(
        path=name,
        kind=row.kind,
        holder=row.pid,
        holder_comm=comm,
        holder_state=state,
        waiters=tuple(sorted(waiters)),
        age_s=age_s,
    )


def _comm_and_state(pid: int, root: str) -> tuple[str, str]:
    try:
        found = parse_stat(procfs.read(procfs.proc(root, pid, "stat")))
    except OSError:
        return "", ""
    return (found.comm, found.state) if found is not None else ("", "")


def _path_of(pid: int, ino: int, root: str) -> tuple[str, float] | None:
    """Path and age of the file with that inode which a process has open, if it is named like a lock."""
    # By inode alone: the device in /proc/locks is that of the file system, which for overlayfs is not the one of stat.
    try:
        links = read_links(pid, root)
    except OSError:
        return None
    for fd, link in links:
        if not link.startswith("/") or not is_lock_file(link.removesuffix(" (deleted)")):
            continue
        try:
            info = os.stat(procfs.proc(root, pid, "fd", fd))
        except OSError:
            continue
        if info.st_ino == ino and stat.S_ISREG(info.st_mode):
            return link, max(0.0, time.time() - info.st_mtime)
    return None


def _batons(processes: Iterable[Process], root: str) -> list[FileLock]:
    places = {place for process in processes for place in _extension_dirs(process, root)}
    found = []
    for answer in deadline.each(partial(_find_batons), sorted(places)):
        if not isinstance(answer, OSError):
            found += [line.split("\t") for line in answer.decode("utf-8", "replace").splitlines()]
    if not found:
        return []
    holders, complete = _open_by({int(ino) for _, ino, _ in found}, root)
    made = []
    for path, ino, mtime in found:
        holder = holders.get(int(ino))
        comm, state = _comm_and_state(holder, root) if holder is not None else ("", "")
        made.append(
            FileLock(
                path=path,
                kind="baton",
                holder=holder,
                holder_comm=comm,
                holder_state=state,
                age_s=max(0.0, time.time() - float(mtime)),
                stale=holder is None and complete,
            )
        )
    return made


def _extension_dirs(process: Process, root: str) -> list[str]:
    """Where torch builds extensions for a process, as seen through its own root."""
    environ = process.environ
    base = procfs.proc(root, process.pid, "root")
    if given := environ.get("TORCH_EXTENSIONS_DIR"):
        return [base + given]
    caches = [environ.get("XDG_CACHE_HOME"), f"{environ['HOME']}/.cache" if "HOME" in environ else None]
    return [f"{base}{cache}/torch_extensions" for cache in caches if cache and cache.startswith("/")][:1]


def _find_batons(place: str) -> bytes:
    """Runs in a child: ``path, inode, mtime`` of every file called ``lock`` at most two directories below."""
    lines: list[str] = []
    try:
        queue = [(place, 0)]
        while queue and len(lines) < _MAX_BATONS:
            directory, depth = queue.pop()
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False) and depth < 2:
                        queue.append((entry.path, depth + 1))
                    elif entry.name == "lock" and entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        inside = "/" + entry.path.partition("/root/")[2]
                        lines.append(f"{inside}\t{info.st_ino}\t{info.st_mtime}")
    except FileNotFoundError:
        pass
    return "\n".join(lines).encode()


def _open_by(inodes: set[int], root: str) -> tuple[dict[int, int], bool]:
    """inode -> a process that has the file open; and whether every process could be asked."""
    found: dict[int, int] = {}
    complete = True
    for pid in procfs.pids(root):
        try:
            links = read_links(pid, root)
        except OSError as error:
            # The first process of all is no builder, and often hidden even from root in a container.
            complete &= error.errno in procfs.GONE or pid == 1
            continue
        for fd, link in links:
            if link.endswith("/lock"):
                try:
                    ino = os.stat(procfs.proc(root, pid, "fd", fd)).st_ino
                except OSError:
                    continue
                if ino in inodes:
                    found.setdefault(ino, pid)
    return found, complete

"""The descriptors of a process: shared memory, sockets, devices."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from vllmdiag.model.base import Missing
from vllmdiag.model.process import ShmFd

from . import procfs

SHM_DIRECTORY = "/dev/shm/"
DELETED = " (deleted)"

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_DEVICE = re.compile(r"/dev/(nvidia|kfd|dri/|accel|infiniband/uverbs)")


class Descriptors(NamedTuple):
    """What /proc/PID/fd says. `n_fds` can be known where the links are not."""

    n_fds: int | None
    shm: tuple[ShmFd, ...] | Missing
    sockets: tuple[int, ...] | Missing
    devices: tuple[str, ...]
    missing: tuple[Missing, ...]


def descriptors(pid: int, root: str = "/") -> Descriptors:
    """Every open descriptor of a process, sorted by what it leads to; never raises."""
    try:
        links = dict(read_links(pid, root))
    except OSError as error:
        hole = procfs.missing(f"descriptors of pid {pid}", error)
        return Descriptors(_count(pid, root), hole, hole, (), (hole,))
    shm, holes = [], []
    for fd, link in links.items():
        if link.startswith(SHM_DIRECTORY):
            try:
                shm.append(_shm_fd(pid, fd, link, root))
            except OSError as error:
                if error.errno not in procfs.GONE:
                    holes.append(procfs.missing(f"identity of {link}, descriptor {fd} of pid {pid}", error))
    sockets = dict.fromkeys(int(found[1]) for link in links.values() if (found := _SOCKET.fullmatch(link)))
    devices = dict.fromkeys(link for link in links.values() if _DEVICE.match(link))
    return Descriptors(len(links), tuple(shm), tuple(sockets), tuple(devices), tuple(holes))


def read_links(pid: int, root: str = "/") -> list[tuple[int, str]]:
    """Pairs of fd and the target of its link, ascending; one closed meanwhile is left out.

    Raises:
        OSError: the directory or a link may not be read, or the process is gone.
    """
    base = procfs.proc(root, pid, "fd")
    links = []
    for fd in sorted(int(name) for name in os.listdir(base)):
        with contextlib.suppress(FileNotFoundError):
            links.append((fd, os.readlink(f"{base}/{fd}")))
    return links


def _shm_fd(pid: int, fd: int, link: str, root: str) -> ShmFd:
    found = os.stat(procfs.proc(root, pid, "fd", fd))
    return ShmFd(
        fd=fd,
        path=link.removesuffix(DELETED),
        deleted=link.endswith(DELETED),
        dev=found.st_dev,
        ino=found.st_ino,
        size=found.st_size,
    )


def _count(pid: int, root: str) -> int | None:
    try:
        return len(os.listdir(procfs.proc(root, pid, "fd")))
    except OSError:
        return None

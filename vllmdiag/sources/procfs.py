"""Files of /proc, read whole; and the one place where an errno becomes words."""

from __future__ import annotations

import errno
import os
import time

from vllmdiag.model.base import Missing

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

GONE = frozenset({errno.ENOENT, errno.ESRCH})
"""Errors of a process that ended while it was looked at."""

_WHY = {
    errno.EACCES: "the kernel refuses it to this user",
    errno.EPERM: "the kernel refuses it without the capability",
    errno.ENOENT: "the process has ended, is hidden, or this kernel does not offer it",
    errno.ESRCH: "the process has ended",
    errno.EINVAL: "the kernel does not offer it for this process",
    errno.ETIMEDOUT: "the read did not return: the target holds its mmap_lock, or the file system does not answer",
}

_ASK = "run as the same user, or as root with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
"""With the first alone, root may not open what belongs to another user (shown in docs/containers.md)."""


def proc(root: str, *parts: str | int) -> str:
    """Path below /proc of the tree at `root`."""
    return os.path.join(root, "proc", *map(str, parts))


def read(path: str, dir_fd: int | None = None) -> bytes:
    """The whole file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        data = os.read(fd, 1 << 16)
        while chunk := os.read(fd, 1 << 16) if data else b"":
            data += chunk
        return data
    finally:
        os.close(fd)


def text(path: str) -> str:
    """The whole file as text. Raises OSError."""
    return read(path).decode("utf-8", "replace")


def pids(root: str) -> list[int]:
    """Pids that /proc lists, ascending; empty where /proc is not there."""
    try:
        names = os.listdir(proc(root))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def uptime(root: str = "/") -> float:
    """Seconds since boot, on the clock that `starttime` uses."""
    if root == "/":
        # Not /proc/uptime: lxcfs shows the age of the container there, while starttime counts from the boot.
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        return float(text(proc(root, "uptime")).split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def missing(what: str, error: OSError, hint: str = _ASK) -> Missing:
    """The hole that `error` leaves. `hint` is the next step where permission was refused."""
    code = error.errno or errno.EIO
    name = errno.errorcode.get(code, str(code))
    if code in GONE:
        hint = "look again"
    elif code == errno.ETIMEDOUT:
        hint = "see the kernel stack of the target (/proc/PID/stack, as root)"
    return Missing(what=what, why=f"{name}: {_WHY.get(code, error.strerror or 'read failed')}", next=hint)

"""Lines of the kernel log that explain a death or a dead device."""

from __future__ import annotations

import os
import re

from vllmdiag.model.base import Missing
from vllmdiag.model.snapshot import KernelLine

from . import procfs

_MATTERS = re.compile(
    r"out of memory|oom-kill|oom_reaper|invoked oom-killer|killed process|memory cgroup out of memory"
    r"|segfault at|general protection|trap invalid opcode|traps: .* trap|potentially unexpected fatal signal"
    r"|\bNVRM\b|\bXid\b|nvidia.*(error|fail)|amdgpu.*(error|fault|reset|fail)|\bSXid\b"
    r"|blocked for more than|soft lockup|hard lockup|rcu.*detected .*stall|machine check|hardware error",
    re.IGNORECASE,
)
_RECORD_BYTES = 1 << 13  # the kernel never returns more than one record, nor a longer one


def kernel_lines(root: str = "/", since_s: float = 3600.0) -> tuple[KernelLine, ...] | Missing:
    """Lines about OOM kills, crashes, GPU errors and hung tasks, oldest first.

    Args:
        root: where the tree with ``dev/kmsg`` is; a plain file of records replays.
        since_s: how far back to look, seconds.
    """
    try:
        data = _records(os.path.join(root, "dev", "kmsg"))
    except FileNotFoundError:
        return Missing(what="kernel log", why="ENOENT: there is no /dev/kmsg here", next="on the host: dmesg -T")
    except OSError as error:
        return procfs.missing("kernel log", error, hint="run as root (CAP_SYSLOG), or read `dmesg -T`")
    oldest = procfs.uptime(root) - since_s
    lines = (parse(record) for record in data.decode("utf-8", "replace").split("\n"))
    return tuple(line for line in lines if line and matters(line.text) and (line.t is None or line.t >= oldest))


def parse(record: str) -> KernelLine | None:
    """One record ``priority,sequence,microseconds,flags;text``; None for the key=value lines that may follow it."""
    prefix, semicolon, text = record.partition(";")
    fields = prefix.split(",")
    if not semicolon or len(fields) < 4:
        return None
    return KernelLine(t=int(fields[2]) / 1e6 if fields[2].isdigit() else None, text=text)


def matters(text: str) -> bool:
    """The line is about a death, a GPU or a hung task."""
    # The kernel's command line matches by its options, and may hold secrets.
    return "ommand line:" not in text and _MATTERS.search(text) is not None


def _records(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    records = []
    try:
        while True:
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten while we read: the next read goes on with the oldest that is left
                continue
            except BlockingIOError:  # the newest has been read
                break
            if not record:
                break
            records.append(record)
    finally:
        os.close(fd)
    return b"".join(records)

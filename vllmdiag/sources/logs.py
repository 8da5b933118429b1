"""The end of the logs that a process writes to, where its stdout or stderr is a regular file: known lines, first error.

Only lines that the table of vllmdiag/vllm/loglines.py knows are kept, and of other errors the type and the frame:
anything else may hold prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from vllmdiag.model.logs import LogDigest
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import LogLine
from vllmdiag.vllm.logscan import ScannedLog, Scanner

from . import deadline, procfs

TAIL_BYTES = 256 << 10


class Logs(NamedTuple):
    """Fields of the snapshot by their names."""

    log_lines: tuple[LogLine, ...] = ()
    logs: tuple[LogDigest, ...] = ()


class _Tail(msgspec.Struct, frozen=True):
    """The end of one file. Empty where it is none that can be read from its end (a pipe, a terminal)."""

    device: int = 0
    inode: int = 0
    size: int = 0
    data: bytes = b""


def read_logs(processes: Iterable[Process], root: str = "/") -> Logs:
    """The last 256 KiB of every log that these processes write, each read once, in their order. Never raises."""
    links: dict[str, tuple[int, int]] = {}
    for process in processes:
        for fd in (1, 2):
            try:
                name = os.readlink(procfs.proc(root, process.pid, "fd", fd))
            except OSError:
                continue
            if name.startswith("/") and not name.startswith("/dev/"):
                links.setdefault(name, (process.pid, fd))
    # A file of a dead network file system does not answer: the child that asks it can be killed.
    answers = deadline.each(partial(_tail, root), list(links.values())) if links else []
    tails = [msgspec.msgpack.decode(a, type=_Tail) if isinstance(a, bytes) else _Tail() for a in answers]
    files = {(t.device, t.inode): (name, t) for name, t in reversed(list(zip(links, tails, strict=True))) if t.data}
    scanned = [_scan(name, tail) for name, tail in reversed(files.values())]
    return Logs(tuple(line for s in scanned for line in s.lines), tuple(s.digest for s in scanned))


def _tail(root: str, opened: tuple[int, int]) -> bytes:
    pid, number = opened
    path = procfs.proc(root, pid, "fd", number)
    if not stat.S_ISREG(os.stat(path).st_mode):
        return msgspec.msgpack.encode(_Tail())
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        data = os.pread(fd, TAIL_BYTES, max(0, found.st_size - TAIL_BYTES))
    finally:
        os.close(fd)
    return msgspec.msgpack.encode(_Tail(device=found.st_dev, inode=found.st_ino, size=found.st_size, data=data))


def _scan(name: str, tail: _Tail) -> ScannedLog:
    scanner = Scanner(name, messages=False, whole=tail.size <= TAIL_BYTES)
    scanner.feed(tail.data)
    return scanner.result()

"""The end of the logs that a process writes to, where its stdout or stderr is a regular file: known lines, first error.

Only lines that the table of vllmdiag/vllm/loglines.py knows are kept, and of other errors the type and the frame:
anything else may hold prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from vllmdiag.model.logs import LogDigest
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import LogLine, Snapshot
from vllmdiag.vllm.logscan import ScannedLog, Scanner

from . import deadline, procfs
from .fds import DELETED

TAIL_BYTES = 256 << 10


class Logs(NamedTuple):
    """Fields of the snapshot by their names."""

    log_lines: tuple[LogLine, ...] = ()
    logs: tuple[LogDigest, ...] = ()

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with these fields."""
        return msgspec.structs.replace(snapshot, **self._asdict())


class _Tail(msgspec.Struct, frozen=True):
    """The end of one file. Empty where it is none that can be read from its end (a pipe, a terminal)."""

    device: int = 0
    inode: int = 0
    size: int = 0
    data: bytes = b""


class LogWatch:
    """The logs that processes write to, held so that they can be read when these have ended."""

    def __init__(self, processes: Iterable[Process], root: str = "/") -> None:
        """Hold them. Never raises, and asks no file system: a path alone is held (O_PATH)."""
        self._held: dict[str, int] = {}
        for process in processes:
            for number in (1, 2):
                path = procfs.proc(root, process.pid, "fd", number)
                try:
                    name = os.readlink(path)
                    if name.startswith("/") and not name.startswith("/dev/") and name not in self._held:
                        self._held[name] = os.open(path, os.O_PATH | os.O_CLOEXEC)
                except OSError:
                    continue

    def read(self) -> Logs:
        """The last 256 KiB of each, once, in their order. Never raises."""
        # A file of a dead network file system does not answer: the child that asks it can be killed.
        answers = deadline.each(_tail, list(self._held.values())) if self._held else []
        tails = [msgspec.msgpack.decode(a, type=_Tail) if isinstance(a, bytes) else _Tail() for a in answers]
        files: dict[tuple[int, int], ScannedLog] = {}
        for name, tail in zip(self._held, tails, strict=True):
            if tail.data and (tail.device, tail.inode) not in files:
                files[tail.device, tail.inode] = _scan(name.removesuffix(DELETED), tail)
        scanned = list(files.values())
        return Logs(tuple(line for s in scanned for line in s.lines), tuple(s.digest for s in scanned))

    def close(self) -> None:
        """Let go of them."""
        while self._held:
            os.close(self._held.popitem()[1])


def _tail(held: int) -> bytes:
    path = f"/proc/self/fd/{held}"
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

"""Known lines at the end of a log that a process writes to, where its stdout or stderr is a regular file.

Only lines that the table of vllmdiag/vllm/loglines.py knows are kept: anything else may hold prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import LogLine
from vllmdiag.vllm.loglines import find

from . import procfs

TAIL_BYTES = 256 << 10
_MAX_LINES = 200
_MAX_CHARS = 500


def log_lines(processes: Iterable[Process], root: str = "/") -> tuple[LogLine, ...]:
    """Known lines of the last 256 KiB of every log that these processes write, in their order. Never raises."""
    files: dict[tuple[int, int], tuple[str, bytes]] = {}
    for process in processes:
        for fd in (1, 2):
            path = procfs.proc(root, process.pid, "fd", fd)
            try:
                found = os.stat(path)
                if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in files:
                    files[found.st_dev, found.st_ino] = (os.readlink(path), _tail(path))
            except OSError:
                continue
    return tuple(line for name, tail in files.values() for line in _known(name, tail))


def _tail(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES))
    finally:
        os.close(fd)


def _known(name: str, tail: bytes) -> list[LogLine]:
    # A progress bar writes its states into one line, each after a carriage return.
    lines = (line.strip() for line in tail.decode("utf-8", "replace").replace("\r", "\n").split("\n"))
    return [LogLine(file=name, number=0, text=line[:_MAX_CHARS]) for line in lines if line and find(line)][-_MAX_LINES:]

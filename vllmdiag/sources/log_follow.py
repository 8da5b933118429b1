"""Known lines as they are appended to a log, for whoever watches over time.

Only lines that the table of vllmdiag/vllm/loglines.py knows are kept: anything else may hold prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import msgspec

from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import LogLine
from vllmdiag.vllm.loglines import find

from . import deadline, procfs

_AT_ONCE = 256 << 10
"""Bytes that are read of one file in one go: what is older is skipped."""
_MAX_CHARS = 500


class _Place(msgspec.Struct, frozen=True):
    """Where a file was read up to."""

    path: str
    device: int = 0
    inode: int = 0
    offset: int | None = None
    """None: it was not looked at yet."""
    rest: bytes = b""
    """The beginning of a line that is still being written."""


class _News(msgspec.Struct, frozen=True):
    """What has come."""

    device: int = 0
    inode: int = 0
    size: int = 0
    data: bytes = b""


class LogFollower:
    """Known lines that come from now on. A file that is truncated or replaced is read from its start.

    Args:
        processes: whose log: where their stdout or stderr is a regular file.
        paths: more files.
        root: where the tree with ``proc`` is.
    """

    def __init__(self, processes: Iterable[Process] = (), paths: Iterable[str] = (), root: str = "/") -> None:
        written = (procfs.proc(root, process.pid, "fd", fd) for process in processes for fd in (1, 2))
        self._places = [_Place(path) for path in (*paths, *written)]
        self.lines()
        unique = {(p.device, p.inode): p for p in reversed(self._places) if p.offset is not None}
        self._places = list(reversed(unique.values()))

    def lines(self) -> tuple[LogLine, ...]:
        """What has come since the last call. Never raises, and never waits long for a file system that is dead."""
        if not self._places:
            return ()
        answers = deadline.each(_news, self._places)
        found: list[LogLine] = []
        places = []
        for place, answer in zip(self._places, answers, strict=True):
            new = place
            if isinstance(answer, bytes):
                new, lines = _digest(place, msgspec.msgpack.decode(answer, type=_News))
                found += lines
            places.append(new)
        self._places = places
        return tuple(found)


def _news(place: _Place) -> bytes:
    """Runs in a child that can be killed. Raises OSError."""
    seen = os.stat(place.path)
    if not stat.S_ISREG(seen.st_mode):
        raise OSError(22, "not a regular file")
    same = (seen.st_dev, seen.st_ino) == (place.device, place.inode) and seen.st_size >= (place.offset or 0)
    begin = seen.st_size if place.offset is None else place.offset if same else 0
    data = b""
    if seen.st_size > begin:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.pread(fd, _AT_ONCE, max(begin, seen.st_size - _AT_ONCE))
        finally:
            os.close(fd)
    return msgspec.msgpack.encode(_News(seen.st_dev, seen.st_ino, seen.st_size, data))


def _digest(place: _Place, news: _News) -> tuple[_Place, list[LogLine]]:
    same = (news.device, news.inode) == (place.device, place.inode)
    whole, newline, rest = ((place.rest if same else b"") + news.data).rpartition(b"\n")
    if not newline:
        whole, rest = b"", rest[-_MAX_CHARS:]
    lines = (line.strip() for line in whole.decode("utf-8", "replace").replace("\r", "\n").split("\n"))
    known = [LogLine(file=place.path, number=0, text=line[:_MAX_CHARS]) for line in lines if line and find(line)]
    return _Place(place.path, news.device, news.inode, news.size, rest[-_MAX_CHARS:]), known

"""A log read in blocks of bytes: only lines that may matter are taken apart.

So the time goes with the size of the log, and the memory does not. Pure: whoever has the file hands in the blocks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from vllmdiag.model.logs import LogDigest
from vllmdiag.model.snapshot import LogLine

from .logdigest import TRACEBACK, LogReader
from .loglines import needles

BLOCK_BYTES = 1 << 20
"""A good size for a block."""
_AFTER_FRAME = 3
"""Lines after a frame of a traceback that may hold the exception: code, carets, and the exception itself."""
_BEFORE_EXCEPTION = (b'File "', TRACEBACK.encode())
_LOOK_BACK = 1 << 12
"""Bytes before a line without a time in which the last time is looked for."""
_MAX_LINE = 1 << 16
"""A line longer than this is cut."""


class ScannedLog(NamedTuple):
    """What a log holds."""

    digest: LogDigest
    lines: tuple[LogLine, ...]
    """The known lines as they stand."""


@cache
def _signs() -> tuple[bytes, ...]:
    """Words of which every line that may matter holds one; none that another one contains."""
    words = {TRACEBACK, 'File "', "Error", "ERROR", "Exception", "CRITICAL", "FATAL", *needles()}
    least = [w for w in words if not any(other in w for other in words - {w})]
    return tuple(word.encode() for word in sorted(least))


class Scanner:
    """Reads one log. Hand it blocks of bytes in their order, then ask for the result."""

    def __init__(
        self, file: str, *, messages: bool = True, whole: bool = True, node: str = "", first_line: int = 1
    ) -> None:
        """Begin.

        Args:
            file: the name to give in events.
            messages: keep the words of errors that are not known (they may hold a prompt).
            whole: False where the blocks are only the tail: its lines have no numbers then.
            node: machine of lines that do not name one themselves.
            first_line: number of the first line.
        """
        self._reader = LogReader(file, messages=messages, node=node)
        self._whole = whole
        self._first = self._number = first_line
        self._size = 0
        self._owed = 0
        self._rest = b""
        self._passed = b""
        """The end of what was left out before the next piece."""

    def feed(self, block: bytes) -> None:
        """Some bytes; they may end anywhere."""
        self._size += len(block)
        data = self._rest + (block.replace(b"\r", b"\n") if b"\r" in block else block)
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if len(self._rest) > _MAX_LINE:  # a line without an end: no text
            end, self._rest = len(data), b""
        self._read(data[:end])

    def result(self) -> ScannedLog:
        """What was read. Ask once, at the end."""
        if self._rest:
            self._read(self._rest + b"\n")
            self._rest = b""
        self._reader.pass_by(self._passed.decode("utf-8", "replace"))
        lines = self._number - self._first
        return ScannedLog(self._reader.digest(lines=lines, size=self._size, whole=self._whole), self._reader.lines())

    def _read(self, data: bytes) -> None:
        """The lines of one piece that matter."""
        starts = iter(sorted(_starts(data)))
        start = next(starts, None)
        at, counted = 0, 0
        while True:
            while start is not None and start < at:
                start = next(starts, None)
            if self._owed and at < len(data):
                begin, self._owed = at, self._owed - 1
            elif start is not None:
                begin = start
            else:
                break
            end = data.find(b"\n", begin)
            line = data[begin : min(end, begin + _MAX_LINE)]
            self._number += data.count(b"\n", counted, begin)
            counted = begin
            if any(sign in line for sign in _BEFORE_EXCEPTION):
                self._owed = _AFTER_FRAME
            skipped = self._passed + data[max(at, begin - _LOOK_BACK) : begin]
            self._passed = b""
            number = self._number if self._whole else 0
            self._reader.feed(number, line.decode("utf-8", "replace"), skipped.decode("utf-8", "replace"))
            at = end + 1
        self._number += data.count(b"\n", counted)
        self._passed = (self._passed + data[at:])[-_LOOK_BACK:]


def _starts(data: bytes) -> set[int]:
    """Where the lines begin that hold a sign."""
    found = set()
    for sign in _signs():
        at = data.find(sign)
        while at >= 0:
            found.add(data.rfind(b"\n", 0, at) + 1)
            end = data.find(b"\n", at)
            at = data.find(sign, end) if end >= 0 else -1
    return found

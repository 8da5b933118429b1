"""Logs of vLLM and of what runs it: any prefix, tracebacks, several processes, of any length.

A log is the one evidence that may be huge. Its lines go through unread, in blocks, to the scanner that a look at a live
server uses too; what comes out is a digest and the lines that are known.
"""

from __future__ import annotations

import re

from vllmdiag.bundle.draft import Draft
from vllmdiag.vllm.logdigest import TRACEBACK
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.logprefix import begins_as_log
from vllmdiag.vllm.logscan import BLOCK_BYTES, Scanner

from .format import Context, Format, Reader

_NEAR = 60
"""A known line without a prefix begins within so many characters; further in it may be a sentence that quotes it."""
_STACK = "(most recent call first):"
_TELLING = ("fault", "relay", "echo", "phase")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b")
_RANK = re.compile(r"\[rank\d+\]:?\s")
"""How torch begins what a rank says."""
_WARNED = re.compile(r"^\s*\S+\.py:\d+: \w*Warning: ")
"""How Python begins a warning."""
_HEADER = re.compile(r"^(?:#|\$ |={3,}|-{3,}$)")


class _Log(Reader):
    """One section of a log."""

    takes_what_it_opens = True

    def __init__(self, context: Context, draft: Draft) -> None:
        self._draft = draft
        self._scanner = Scanner(context.source, node=context.node, first_line=max(1, context.line))
        self._lines: list[str] = []
        self._size = 0

    def take(self, line: str) -> bool:
        if line and not line.isspace() and not _mine(line):
            return False
        self._keep(line)
        return True

    def also(self, line: str) -> bool:
        if _HEADER.match(line):
            return False
        self._keep(line)
        return True

    def close(self) -> None:
        self._flush()
        digest, lines = self._scanner.result()
        self._draft.add("logs", digest)
        self._draft.add("log_lines", *lines)

    def _keep(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line)
        if self._size >= BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._scanner.feed(("\n".join(self._lines) + "\n").encode("utf-8", "replace"))
            self._lines, self._size = [], 0


def _mine(line: str) -> bool:
    if _STACK in line:
        return False  # a dump of faulthandler in the middle of a log
    return begins_as_log(line) or TRACEBACK in line or _RANK.match(line) is not None or _said_bare(line)


def _said_bare(line: str) -> bool:
    """A line of a library or of Python itself, without any prefix."""
    if _EXCEPTION.match(line):
        return True
    known = find(line)
    if known is None or known.kind.part not in _TELLING:
        return False
    at = re.search(known.kind.regex, line)
    warned = _WARNED.match(line)
    return at is not None and at.start() < _NEAR + (warned.end() if warned is not None else 0)


FORMATS = (
    Format(
        name="vLLM log",
        opens=lambda line, _context: _mine(line),
        reader=_Log,
        names=("log", "vllm", "server", "stdout", "stderr", "journal"),
    ),
)

"""What known lines of a vLLM log mean, and which of them only echo a fault that is elsewhere."""

from __future__ import annotations

import re
from functools import cache

import msgspec

from .tables import load
from .versions import Version, in_range, parse

_PREFIX = re.compile(r"\((?P<label>[A-Za-z][\w.:-]*(?: rank=\d+| [A-Z]+\d+)?) pid=(?P<pid>\d+)(?:, ip=[^)]*)?\)")
_SOURCE = re.compile(r"\[(?:\S*/)?(?P<file>\w+\.py):(?P<line>\d+)\]")


class LogLineKind(msgspec.Struct, frozen=True):
    """A known line."""

    id: str
    regex: str
    meaning: str
    source: str
    level: str = ""
    """As vLLM logs it; empty where that differs or it is an exception."""
    part: str = "note"
    """``fault`` (an error by itself), ``relay`` (says that another has failed, and what), ``echo`` (says only that
    something has), ``phase`` (a step or a wait of a start-up), ``note``."""
    echo: bool = False
    """Only the echo of a fault elsewhere: never a cause by itself."""
    ends: bool = False
    """After it the engine serves nobody any more."""
    cause: str = ""
    """Slug of the catalogue that this line means where nothing speaks against it; empty where it decides nothing."""
    needles: tuple[str, ...] = ()
    """Every line of this kind holds one of these: a search for them is cheap."""
    since: str | None = None
    until: str | None = None


class LogMatch(msgspec.Struct, frozen=True):
    """A known line, found."""

    kind: LogLineKind
    groups: dict[str, str]
    """The named parts, e.g. ``{"local": "0", "remote": "1", "stage": "connect"}``."""


class _Lines(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    writer: int
    reader: int


class _Tables(msgspec.Struct, frozen=True):
    kinds: tuple[LogLineKind, ...]
    long_wait: tuple[_Lines, ...]
    echo_frames: str
    """Innermost frames of exceptions that only tell that another process has not answered."""
    server_sources: str
    """Files of the server: what they log of a single request is no fault of the engine."""


@cache
def _tables() -> _Tables:
    return load("loglines", _Tables)


@cache
def kinds() -> tuple[LogLineKind, ...]:
    """Every known line, more exact ones first."""
    return _tables().kinds


@cache
def _pattern(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


@cache
def kind(id: str) -> LogLineKind:
    """One of them. An id that the table does not have, of a later version, means nothing."""
    return {entry.id: entry for entry in kinds()}.get(id) or LogLineKind(id=id, regex="", meaning="", source="")


@cache
def needles() -> tuple[str, ...]:
    """Words of which every known line holds one."""
    return tuple(dict.fromkeys(needle for kind in kinds() for needle in kind.needles))


def find(text: str, version: str | None = None) -> LogMatch | None:
    """The first known line that a log line contains; None where it is none."""
    for kind in kinds():
        if not any(needle in text for needle in kind.needles):
            continue
        found = _pattern(kind.regex).search(text)
        if found is not None and in_range(version, kind.since, kind.until):
            return LogMatch(kind, {name: value for name, value in found.groupdict().items() if value is not None})
    return None


def is_echo_frame(frame: str) -> bool:
    """An exception that was raised there (``core.py:133 in step``) only tells that another process has not answered."""
    return re.search(_tables().echo_frames, frame) is not None


def is_server_source(source: str) -> bool:
    """A line of the API server, by the place in the code that has logged it (``async_llm.py:906``)."""
    return re.match(_tables().server_sources, source) is not None


def origin_of(text: str) -> tuple[str, int] | None:
    """(label, pid) of the process a log line is of: ``(Worker_TP1 pid=30199) INFO ...``; None where it tells none."""
    found = _PREFIX.match(text.lstrip())
    return (found["label"], int(found["pid"])) if found else None


def side_of(text: str, version: str | None = None) -> str | None:
    """Who logged "No available shared memory broadcast block found": ``writer`` (the ring is full) or ``reader``.

    The two say the same words from two lines of shm_broadcast.py, so the line number in the log tells them apart.

    Returns:
        None where the line has no number, or no release is known in which that line says it.
    """
    found = _SOURCE.search(text)
    if found is None or found["file"] != "shm_broadcast.py":
        return None
    number = int(found["line"])
    wanted = parse(version) if version is not None else None
    sides = {
        side
        for lines in _tables().long_wait
        if wanted is None or wanted in _releases(lines)
        for side, at in (("writer", lines.writer), ("reader", lines.reader))
        if at == number
    }
    return sides.pop() if len(sides) == 1 else None


def _releases(lines: _Lines) -> set[Version | None]:
    return {parse(version) for version in lines.versions}

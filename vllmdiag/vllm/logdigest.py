"""From the lines of a vLLM log to its first error, with the echoes of it folded.

Tracebacks are put together by process, starts of the server told apart. Lines are taken one by one and little is kept,
so a log of any size can be read. Pure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from vllmdiag.model.logs import LogDigest, LogEvent, LogRing
from vllmdiag.model.snapshot import LogLine

from .loglines import LogMatch, find, is_echo_frame, is_server_source
from .logprefix import Said, said
from .logrequests import Requests
from .titles import from_label

TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r"\s*File \"(?P<file>[^\"]+)\", line (?P<line>\d+)(?:, in (?P<name>\S+))?")
_EXCEPTION = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (?P<words>.*)|:?$)")
_MAINS = {"worker_busy_loop": "Worker", "worker_main": "Worker", "run_busy_loop": "EngineCore"}
"""Functions that only one kind of process runs."""
_ERROR_LEVELS = ("ERROR", "CRITICAL", "FATAL")
_MAX_CHARS = 500
_MAX_EVENTS = 400
"""Errors and echoes kept of one start of the server; from then on only counted."""
_MAX_LINES = 200
_REQUESTS = ("request_arrived", "request_aborted", "request_finished")
_BANNERS = ("banner", "engine_init")
_KEPT_BEFORE = 3
"""Starts of the server that are remembered with their errors."""


@dataclass
class _Trace:
    """A traceback that is being read: one a process."""

    head: LogEvent
    heading: tuple[object, ...] | None = None
    """Key of the line that announced it: the exception says more, and takes its place."""
    frame: str = ""
    label: str = ""
    """Whose main function one of its frames is: a traceback without a prefix tells by that who raised it."""
    lines_left: int = 400


@dataclass
class _Generation:
    """One start of the server."""

    errors: dict[tuple[object, ...], LogEvent] = field(default_factory=dict)
    served: bool = False
    fatal: bool = False
    engines: set[int | None] = field(default_factory=set)
    began_by: str = ""


class LogReader:
    """Reads one log. Feed it lines in their order, then ask for the `digest`."""

    def __init__(self, file: str, *, messages: bool = True, node: str = "") -> None:
        """Begin.

        Args:
            file: name to give in events.
            messages: keep the words of errors that no entry of the table knows. Such words may hold a prompt, so a look
                at a live server goes without them.
            node: machine of lines that do not name one themselves.
        """
        self._file = file
        self._node = node
        self._messages = messages
        self._number = 0
        self._at: float | None = None
        self._time = ""
        self._inner_clock = False
        self._generations = [_Generation()]
        self._starts = 1
        self._traces: dict[tuple[object, ...], _Trace] = {}
        self._ended_at: dict[tuple[object, ...], float | None] = {}
        """When a process has told an exception: what it says from the same place in the same second belongs to it."""
        self._headings: dict[tuple[object, ...], tuple[object, ...]] = {}
        self._phases: dict[tuple[object, ...], LogEvent] = {}
        self._rings: dict[str, LogRing] = {}
        self._requests = Requests()
        self._version: str | None = None
        self._first_lines: list[LogLine] = []
        self._last_lines: deque[LogLine] = deque(maxlen=_MAX_LINES)

    def feed(self, number: int, line: str, skipped: str = "") -> None:
        """One line.

        Args:
            number: from 1; 0 where it is not known.
            line: as it stands in the file, of any length.
            skipped: lines before it that were left out; a line without a time is as old as the last of them.
        """
        self._number = number
        parts = list(said(line))
        if skipped and parts and parts[0].at is None:
            self.pass_by(skipped)
        for part in parts:
            self._take(part)

    def pass_by(self, skipped: str) -> None:
        """Lines that do not matter: only the time of the last one that tells it."""
        for line in reversed(skipped.splitlines()):
            timed = [part for part in said(line) if part.time]
            if timed:
                self._tick(timed[-1])
                return

    def lines(self) -> tuple[LogLine, ...]:
        """The known lines as they stand, the first and the last ones."""
        return (*self._first_lines, *self._last_lines)

    def digest(self, *, lines: int = 0, size: int = 0, whole: bool = True) -> LogDigest:
        """What was read.

        Args:
            lines: how many lines the log has.
            size: its bytes.
            whole: False where only the tail was read.
        """
        for key in list(self._traces):
            self._close(key)
        generation = self._that_matters()
        errors = sorted(generation.errors.values(), key=lambda e: (e.at or 0.0, e.number))
        first = first_error(errors)
        last = self._generations[-1]
        return LogDigest(
            file=self._file,
            lines=lines,
            bytes=size,
            whole=whole,
            version=self._version,
            generations=self._starts,
            first_error=first,
            echoes=tuple(e for e in errors if e.part == "echo")[:40],
            other_errors=tuple(e for e in errors if e.part != "echo" and e is not first)[:20],
            phases=tuple(sorted(self._phases.values(), key=lambda e: e.number))[-100:],
            rings=tuple(self._rings.values()),
            arrived=self._requests.arrived,
            aborts=tuple(self._requests.aborts()),
            served=last.served,
            failed=last.fatal,
            last_time=self._time,
        )

    # -- one line -----------------------------------------------------------------------------------------------------

    def _take(self, part: Said) -> None:
        self._tick(part)
        key = (part.node, part.label, part.pid, part.source)
        known = find(part.text)
        if known is not None and known.kind.id in _REQUESTS:
            self._requests.take(known, len(part.text), self._at)
            return
        if known is not None and known.kind.id == "stats":
            self._generations[-1].served = True  # a log may begin, or be cut out, after its start
            return
        if known is not None and known.kind.id in _BANNERS:
            self._start(part, known)
        if TRACEBACK in part.text:
            self._close(key)
            self._traces[key] = _Trace(self._event(part, "exception", "fault", part.text), self._headings.get(key))
            if known is not None:  # "EngineCore hit an exception: Traceback ..."
                self._known(part, known)
            return
        if key not in self._traces and (frame := _FRAME.match(part.text)) and frame["name"]:  # its head was cut off
            self._traces[key] = _Trace(self._event(part, "exception", "fault", part.text), self._headings.get(key))
        if key in self._traces:
            self._within(key, part, known)
            return
        if known is not None:
            self._known(part, known)
        elif part.level in _ERROR_LEVELS and part.text.strip() and self._ended_at.get(key, -1.0) != self._at:
            self._headings[key] = self._put(self._event(part, "error", "relay", part.text))
        elif (bare := _EXCEPTION.fullmatch(part.text)) and bare["type"].endswith(("Error", "Exception", "Interrupt")):
            # Without a traceback: a time-out that says nothing more is of somebody who waited.
            sort = "echo" if bare["type"] == "TimeoutError" and not bare["words"] else "fault"
            self._put(self._event(part, "exception", sort, part.text, exception=bare["type"]))

    def _tick(self, part: Said) -> None:
        if part.at is not None:
            self._inner_clock = True
            self._at = part.at
        elif not self._inner_clock and part.outer_at is not None:
            self._at = part.outer_at
        self._time = part.time or self._time

    def _within(self, key: tuple[object, ...], part: Said, known: LogMatch | None) -> None:
        """A line of a traceback: a frame, a line of code, or the exception that ends it."""
        trace = self._traces[key]
        if frame := _FRAME.match(part.text):
            name = f" in {frame['name']}" if frame["name"] else ""
            trace.frame = f"{frame['file'].rpartition('/')[2]}:{frame['line']}{name}"
            trace.label = trace.label or _MAINS.get(frame["name"] or "", "")
            return
        words = _EXCEPTION.fullmatch(part.text.rstrip())
        trace.lines_left -= 1
        if words is not None and not part.text.startswith(" "):
            del self._traces[key]
            self._ended(trace, part, words["type"], known)
        elif known is not None and known.kind.part in ("fault", "echo", "relay"):
            del self._traces[key]
            self._ended(trace, part, "", known)
        elif trace.lines_left <= 0:
            self._close(key)

    def _ended(self, trace: _Trace, part: Said, kind: str, known: LogMatch | None) -> None:
        exception = kind.rpartition(".")[2]
        event = self._event(part, "exception", "fault", part.text, exception=exception, frame=trace.frame)
        event = msgspec.structs.replace(event, label=event.label or trace.label)
        if known is not None:
            event = msgspec.structs.replace(
                event, kind=known.kind.id, part=known.kind.part, groups=known.groups, text=part.text[:_MAX_CHARS]
            )
            self._keep(part)
            self._generations[-1].fatal |= known.kind.ends
        elif is_echo_frame(trace.frame):
            event = msgspec.structs.replace(event, part="echo")
        if trace.heading is not None:
            self._generations[-1].errors.pop(trace.heading, None)
        self._ended_at[part.node, part.label, part.pid, part.source] = self._at
        self._put(msgspec.structs.replace(event, number=trace.head.number or event.number))

    def _close(self, key: tuple[object, ...]) -> None:
        """A traceback whose end did not come."""
        trace = self._traces.pop(key, None)
        if trace is not None and trace.frame:
            self._put(msgspec.structs.replace(trace.head, frame=trace.frame, part="relay"))

    def _known(self, part: Said, known: LogMatch) -> None:
        self._keep(part)
        # What is logged at such a level is said of a fault, and is none.
        quiet = known.kind.part == "fault" and part.level in ("DEBUG", "INFO")
        sort = "note" if quiet else known.kind.part
        event = self._event(part, known.kind.id, sort, part.text, groups=known.groups)
        if known.kind.id == "ring_handle":
            self._ring(event)
        if known.kind.id == "started":
            self._generations[-1].served = True
        self._generations[-1].fatal |= known.kind.ends
        if sort in ("fault", "relay", "echo"):
            self._announced(part, event)
            put = self._put(event)
            if sort == "relay" and not known.kind.cause:
                self._headings[part.node, part.label, part.pid, part.source] = put
        else:
            self._count(self._phases, (event.kind, event.node, event.label, event.pid), event)

    def _announced(self, part: Said, event: LogEvent) -> None:
        """Evidence that was cut short has no traceback between a headline and what it announces: that says more."""
        key = (part.node, part.label, part.pid, part.source)
        headline = self._generations[-1].errors.get(self._headings.get(key, ()))
        if headline is not None and headline.kind != event.kind and (part.source or headline.at == event.at):
            del self._generations[-1].errors[self._headings.pop(key)]

    def _keep(self, part: Said) -> None:
        """The line as vLLM wrote it, without what others have put before it."""
        label = f"({part.label} pid={part.pid})" if part.label else ""
        where = f"[{part.source}]" if part.source else ""
        words = " ".join(word for word in (label, part.level, part.level and part.time, where) if word)
        text = f"{words} {part.text}".lstrip()[:_MAX_CHARS]
        line = LogLine(file=self._file, number=self._number, text=text)
        if len(self._first_lines) < _MAX_LINES // 4:
            self._first_lines.append(line)
        else:
            self._last_lines.append(line)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _event(self, part: Said, kind: str, sort: str, text: str, **more: object) -> LogEvent:
        unknown = kind in ("exception", "error")
        if unknown and not self._messages:
            text = text.partition(":")[0] if kind == "exception" else ""
        identity = from_label(part.label) if part.label else None
        event = LogEvent(
            kind=kind,
            part=sort,
            file=self._file,
            number=self._number,
            text=text.strip()[:_MAX_CHARS],
            time=part.time or self._time,
            at=self._at,
            label=identity.name if identity is not None else part.label,
            pid=part.pid,
            rank=part.rank,
            node=part.node or self._node,
            source=part.source,
            generation=self._starts,
        )
        return msgspec.structs.replace(event, **more)

    def _put(self, event: LogEvent) -> tuple[object, ...]:
        errors = self._generations[-1].errors
        # An exception has no words where they may hold a prompt: the frame tells one from the other then.
        words = event.text[:80] if event.kind in ("exception", "error") else ""
        key = (event.kind, event.node, event.label, event.pid, words, event.frame if not words else "")
        if key in errors or len(errors) < _MAX_EVENTS:
            self._first_of(errors, key, event)
        return key

    @staticmethod
    def _first_of(events: dict[tuple[object, ...], LogEvent], key: tuple[object, ...], event: LogEvent) -> None:
        """The first of its kind, with how many came."""
        known = events.get(key)
        events[key] = msgspec.structs.replace(known, count=known.count + 1) if known is not None else event

    @staticmethod
    def _count(events: dict[tuple[object, ...], LogEvent], key: tuple[object, ...], event: LogEvent) -> None:
        """The last of its kind, with how many came."""
        known = events.pop(key, None)
        if known is None and len(events) >= _MAX_EVENTS:
            del events[next(iter(events))]
        events[key] = msgspec.structs.replace(event, count=known.count + 1 if known is not None else 1)

    def _ring(self, event: LogEvent) -> None:
        groups = event.groups
        if len(self._rings) < _MAX_EVENTS:
            self._rings[groups["name"]] = LogRing(
                name=groups["name"],
                readers=int(groups["readers"]),
                chunk_bytes=int(groups["chunk_bytes"]),
                chunks=int(groups["chunks"]),
                label=event.label,
                pid=event.pid,
            )

    # -- starts of the server -----------------------------------------------------------------------------------------

    def _start(self, part: Said, known: LogMatch) -> None:
        """A banner. A second one of the same kind begins a new generation, unless several engines start at once."""
        self._version = known.groups.get("version") or known.groups.get("version2") or self._version
        now = self._generations[-1]
        kind = known.kind.id
        if now.began_by == "" or (kind == "banner" and now.began_by == "engine_init" and not now.served):
            now.began_by = kind
        elif kind == now.began_by and (kind == "banner" or part.pid in now.engines or now.served or now.fatal):
            for key in list(self._traces):
                self._close(key)
            self._generations = [*self._generations[-_KEPT_BEFORE:], _Generation(began_by=kind)]
            self._starts += 1
            self._phases.clear()
        self._generations[-1].engines.add(part.pid)

    def _that_matters(self) -> _Generation:
        """The last start that failed; of several in a row that never served, the first one.

        The later ones often fail of what the first has left behind, and hide it.
        """
        generations = self._generations
        at = len(generations) - 1
        if not generations[at].errors and at > 0 and not generations[at].served:
            at -= 1
        while at > 0 and not generations[at].served and first_error(generations[at - 1].errors.values()) is not None:
            at -= 1
        return generations[at]


def first_error(errors: Iterable[LogEvent]) -> LogEvent | None:
    """The first error that is more than an echo; None where there is none.

    Errors by themselves come before lines that only pass on that another has failed, and what the engine and its
    workers say before what the server says: it logs the failure of a single request in the same way.
    """
    ordered = sorted((e for e in errors if e.part in ("fault", "relay")), key=lambda e: (e.at or 0.0, e.number))
    return min(ordered, key=_weight, default=None)


def _weight(event: LogEvent) -> int:
    """0 for a known fault or an exception of the engine, more for what says less. Of equals the first one counts."""
    identity = from_label(event.label) if event.label else None
    server = identity.role == "APIServer" if identity is not None else is_server_source(event.source)
    known = event.kind not in ("exception", "error")
    if event.part == "fault":
        return 0 if known or not server else 2
    return 1 if known else 3

"""Requests in a log: how old they were when they were aborted, and whether one of the same length came again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from vllmdiag.model.logs import LogAbort

from .loglines import LogMatch

_MOST_OPEN = 20_000
"""Requests that have come and not ended, as far as they are remembered; the oldest is forgotten first."""
_MOST_ABORTS = 200
_AGAIN_S = 60.0
"""A request that comes so soon after an abort may be its repetition."""


@dataclass
class _Aborted:
    at: float
    age: float
    size: int
    again: float | None = None


class Requests:
    """Takes the lines of requests in their order. Their words, which hold prompts, are only measured."""

    def __init__(self) -> None:
        self.arrived = 0
        """How many have come."""
        self._open: dict[str, tuple[float, int]] = {}
        self._aborted: deque[_Aborted] = deque(maxlen=_MOST_ABORTS)

    def take(self, known: LogMatch, size: int, at: float | None) -> None:
        """One line.

        Args:
            known: what it is, with the id of the request.
            size: its length: that of a repeated prompt is the same.
            at: when, in seconds; None where the log has no times.
        """
        name = known.groups.get("request") or known.groups.get("request2") or ""
        if known.kind.id == "request_arrived":
            # Both the front end ("Received") and the engine ("Added") tell of one request.
            if name not in self._open:
                self.arrived += 1
                self._came(size, at)
                self._open[name] = (at or 0.0, size)
                if len(self._open) > _MOST_OPEN:
                    del self._open[next(iter(self._open))]
            return
        began = self._open.pop(name, None)
        if known.kind.id == "request_aborted" and began is not None and at is not None:
            self._aborted.append(_Aborted(at=at, age=at - began[0], size=began[1]))

    def _came(self, size: int, at: float | None) -> None:
        if at is None:
            return
        for aborted in self._aborted:
            if aborted.again is None and aborted.size == size and 0 <= at - aborted.at <= _AGAIN_S:
                aborted.again = at - aborted.at
                return

    def aborts(self) -> Iterator[LogAbort]:
        """The aborted ones, oldest first."""
        for aborted in self._aborted:
            yield LogAbort(age_s=aborted.age, again_s=aborted.again)

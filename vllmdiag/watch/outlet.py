"""Where everything goes that `watch` has to say: events, pictures, the recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceView
from vllmdiag.model.watch import Event, EventKind, Frame
from vllmdiag.sources.window import now

from .recorder import Recorder

_SHOWN = 6
"""Events below a picture."""


class Outlet:
    """Speaks for one `watch`.

    Args:
        emit: is given every event.
        show: is given a picture after every round; None where nobody looks.
        recorder: records the rounds; None where nothing is recorded.
    """

    def __init__(
        self, emit: Callable[[Event], None], show: Callable[[Frame], None] | None, recorder: Recorder | None
    ) -> None:
        self._emit, self._show, self._recorder = emit, show, recorder
        self._recent: deque[Event] = deque(maxlen=_SHOWN)
        self.generation = 0
        """Number of the server that is watched."""

    def event(self, kind: EventKind, summary: str, **more: object) -> None:
        """Say that something has happened; `more` are fields of an `Event`."""
        plain = Event(at=now(), kind=kind, summary=summary, generation=self.generation)
        event = msgspec.structs.replace(plain, **more)
        self._recent.append(event)
        self._emit(event)
        if self._recorder is not None:
            self._recorder.event(event)

    @property
    def seen(self) -> bool:
        """Somebody looks at pictures."""
        return self._show is not None

    def picture(self, frame: Frame) -> None:
        """Show a picture, with the last events below it."""
        if self._show is not None:
            self._show(msgspec.structs.replace(frame, events=tuple(self._recent)))

    def round(self, snapshot: Snapshot, view: InstanceView, at: str, t: float) -> None:
        """Record a round; see `Recorder.round`."""
        if self._recorder is not None:
            self._recorder.round(snapshot, view, self.generation, at, t)

    def close(self) -> None:
        """End the recording."""
        if self._recorder is not None:
            self._recorder.close()

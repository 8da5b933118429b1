"""What a report draws, from one snapshot: the judge's answer, the view, the waits, the lag of each reader."""

from __future__ import annotations

from vllmdiag.model.report import LagTrace, Report, WaitGraph
from vllmdiag.model.ring import RingState
from vllmdiag.model.snapshot import Snapshot

from .case import Case
from .graph import wait_graph
from .judge import diagnose
from .scene import scene_of
from .view import QUEUE_WORDS, view


def report_of(snapshot: Snapshot) -> Report:
    """Judge a snapshot and gather what can be drawn of it. Pure, as `diagnose` is."""
    diagnosis = diagnose(snapshot)
    scene = scene_of(snapshot)
    case = Case(scene) if scene is not None else None
    return Report(
        diagnosis=diagnosis,
        view=view(snapshot),
        graph=wait_graph(case, diagnosis) if case is not None else WaitGraph(),
        traces=_traces(case) if case is not None else (),
    )


def _traces(case: Case) -> tuple[LagTrace, ...]:
    """Lag over the window, of the rings in which something was seen to wait."""
    return tuple(
        LagTrace(
            segment=ring.segment.name,
            queue=QUEUE_WORDS[ring.queue],
            readers=tuple(
                case.label(pid) if pid is not None else f"reader {index}" for index, pid in enumerate(ring.readers)
            ),
            slots=ring.geometry.chunks,
            points=lag_points(ring.history),
            end_s=max(ring.segment.polled_s, ring.history[-1][0]),
            source="the window",
        )
        for ring in case.rings
        if ring.sampled and any(any(state.lag) for _, state in ring.history)
    )


def lag_points(history: tuple[tuple[float, RingState], ...]) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """The history of a ring reduced to the moments at which the lag of a reader changed."""
    points: list[tuple[float, tuple[int, ...]]] = []
    for t, state in history:
        if not points or points[-1][1] != state.lag:
            points.append((t, state.lag))
    return tuple(points)

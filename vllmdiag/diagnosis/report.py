"""What a report draws, from one snapshot: the judge's answer, the view, the waits, the lag of each reader."""

from __future__ import annotations

from vllmdiag.model.recording import Recording, Track
from vllmdiag.model.report import LagTrace, Report, WaitGraph
from vllmdiag.model.ring import RingState, decode
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import Party

from .case import Case
from .graph import wait_graph
from .judge import diagnose
from .scene import scene_of
from .stack_tree import stack_trees
from .view import QUEUE_WORDS, view


def report_of(snapshot: Snapshot) -> Report:
    """Judge a snapshot and gather what can be drawn of it. Pure, as `diagnose` is."""
    diagnosis = diagnose(snapshot)
    scene = scene_of(snapshot)
    case = Case(scene) if scene is not None else None
    seen = view(snapshot)
    return Report(
        diagnosis=diagnosis,
        view=seen,
        graph=wait_graph(case, diagnosis) if case is not None else WaitGraph(),
        traces=_traces(case) if case is not None else (),
        stacks=stack_trees([s for s in seen.stacks if s.main or s.on_cpu or s.meaning]),
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
            start_s=ring.history[0][0],
            end_s=max(ring.history[0][0] + ring.segment.polled_s, ring.history[-1][0]),
            source="the window",
        )
        for ring in case.rings
        if ring.sampled and any(any(state.lag) for _, state in ring.history)
    )


def recorded_traces(recording: Recording, name: str) -> tuple[LagTrace, ...]:
    """Lag over the time of a recording, of the rings in which something waited: those that lag at the end come first.

    Args:
        recording: one server after the other.
        name: what the recording is called.
    """
    several = len(recording.generations) > 1
    traces = [
        LagTrace(
            segment=track.ring.segment,
            queue=track.ring.queue,
            readers=tuple(
                party.label if party is not None else f"reader {index}" for index, party in enumerate(_readers(track))
            ),
            slots=track.ring.geometry.chunks,
            points=_recorded_points(track),
            start_s=generation.start_s,
            end_s=generation.end_s,
            source=f"{name}, server {number}" if several else name,
        )
        for number, generation in enumerate(recording.generations, start=1)
        for track in generation.tracks
    ]
    lagging = [trace for trace in traces if any(map(any, (lags for _, lags in trace.points)))]
    return tuple(sorted(lagging, key=lambda trace: -max(trace.points[-1][1])))


def _readers(track: Track) -> tuple[Party | None, ...]:
    known = track.ring.readers
    return (*known, *[None] * (track.ring.geometry.n_readers - len(known)))[: track.ring.geometry.n_readers]


def _recorded_points(track: Track) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Lags by the flags alone: of hours at 100 Hz, each ring stands in few different ways, but often."""
    known: dict[bytes, tuple[int, ...]] = {}
    points: list[tuple[float, tuple[int, ...]]] = []
    for t, flags in zip(track.times, track.flags, strict=True):
        lags = known.get(flags)
        if lags is None:
            lags = known[flags] = decode(flags, track.ring.geometry.n_readers).lag
        if not points or points[-1][1] != lags:
            points.append((t, lags))
    return tuple(points)


def lag_points(history: tuple[tuple[float, RingState], ...]) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """The history of a ring reduced to the moments at which the lag of a reader changed."""
    points: list[tuple[float, tuple[int, ...]]] = []
    for t, state in history:
        if not points or points[-1][1] != state.lag:
            points.append((t, state.lag))
    return tuple(points)

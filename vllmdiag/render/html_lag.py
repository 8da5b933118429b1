"""The lag of the readers of a ring over time, as lines to draw: equal readers once, those that lag at the end first.

Time is cut into as many parts as a screen can show, each with the largest lag in it: a peak is never averaged away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllmdiag.model.report import LagTrace

from .words import fold_labels, plural

_MOST_PARTS = 240
_MOST_LINES = 6
"""More lines than this cannot be told apart; the others are said in words."""
HEIGHT = 132.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 30.0, 10.0, 10.0, 22.0

Points = Sequence[tuple[float, tuple[int, ...]]]


@dataclass(frozen=True)
class LagLine:
    """Readers that lagged alike."""

    name: str
    path: str
    """Path data, a line of steps."""
    most: int
    now: int
    """At the end of the time."""


@dataclass(frozen=True)
class LagChart:
    """One chart in a plane of `width` x `HEIGHT`."""

    width: float
    lines: tuple[LagLine, ...]
    rest: str
    """What is not drawn, in words."""
    levels: tuple[tuple[float, int], ...]
    """(y, messages) of the horizontal rules."""
    times: tuple[tuple[float, float], ...]
    """(x, seconds) of the marks below."""
    left: float = _LEFT
    bottom: float = HEIGHT - _BOTTOM


def lag_chart(trace: LagTrace, width: float) -> LagChart:
    """Lay one trace out.

    Args:
        trace: what was recorded.
        width: CSS pixels.
    """
    parts = peaks(trace.points, trace.end_s, _MOST_PARTS)
    top = max(trace.slots, *(max(lags, default=0) for _, lags in parts), 1)
    groups: dict[tuple[int, ...], list[str]] = {}
    for k, label in enumerate(trace.readers):
        groups.setdefault(tuple(lags[k] for _, lags in parts), []).append(label)
    ordered = sorted(groups.items(), key=lambda item: (-_last(trace, item[1][0]), -max(item[0], default=0)))
    span = (trace.end_s - trace.start_s) or 1.0

    def x(t: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * min(1.0, max(0.0, (t - trace.start_s) / span))

    def y(lag: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * lag / top

    lines = tuple(
        LagLine(
            name=fold_labels(labels),
            path=_steps([(x(t), y(lag)) for (t, _), lag in zip(parts, lags, strict=True)], x(trace.end_s)),
            most=max(lags, default=0),
            now=_last(trace, labels[0]),
        )
        for lags, labels in ordered[:_MOST_LINES]
    )
    left_out = ordered[_MOST_LINES:]
    rest = ""
    if left_out:
        most = max(max(lags, default=0) for lags, _ in left_out)
        rest = f"{plural(sum(len(labels) for _, labels in left_out), 'other reader')}: never more than {most} unread"
    return LagChart(
        width=width,
        lines=lines,
        rest=rest,
        levels=tuple((y(n), n) for n in sorted({0, top // 2, top})),
        times=tuple((x(t), t) for t in (trace.start_s + span * part for part in (0.0, 0.5, 1.0))),
    )


def peaks(points: Points, end_s: float, most: int) -> list[tuple[float, tuple[int, ...]]]:
    """At most `most` points: the largest lag of each reader in each part of the time.

    Args:
        points: (time, lags from then on), in order of time.
        end_s: end of the time.
        most: number of parts.
    """
    if len(points) <= most:
        return list(points)
    start = points[0][0]
    part_s = (end_s - start) / most or 1.0
    found: list[tuple[float, tuple[int, ...]]] = []
    current, k = points[0][1], 0
    for part in range(most):
        highest = list(current)
        while k < len(points) and (points[k][0] < start + (part + 1) * part_s or part == most - 1):
            current = points[k][1]
            highest = [max(a, b) for a, b in zip(highest, current, strict=True)]
            k += 1
        found.append((start + part * part_s, tuple(highest)))
    return found


def _steps(points: Sequence[tuple[float, float]], end: float) -> str:
    """A line that stays where it is until the next point."""
    if not points:
        return ""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{a:.1f}V{b:.1f}" for a, b in rest) + f"H{end:.1f}"


def _last(trace: LagTrace, label: str) -> int:
    return trace.points[-1][1][trace.readers.index(label)] if trace.points else 0

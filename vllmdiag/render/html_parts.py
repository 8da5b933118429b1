"""What the page of a report shows, sorted and folded so that 384 ranks fit on it as well as two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllmdiag.model.ranks import fold
from vllmdiag.model.report import LagTrace
from vllmdiag.model.ring import Slot
from vllmdiag.model.view import MemberView, ReaderView, RingView

from .html_lag import LagChart, lag_chart
from .page import Role
from .ps import state_words
from .ring import MOTION, in_order, reader_cells, reader_groups, reader_name
from .words import between, duration, fold_labels, plural, size, whom

_MOST_GRIDS = 16
"""Healthy rings beyond this number are a line of the table only."""
_FEW = 8
"""So many labels are named, more are counted where they do not fold."""
_LONG = 60
NARROW, WIDE = 330.0, 640.0
"""Widths in which charts are drawn, CSS pixels: for a telephone, and for a page."""


@dataclass(frozen=True)
class ActivityRow:
    """Members of one role that do the same."""

    mark: str
    """A letter, which stands for them in the map."""
    members: tuple[MemberView, ...]
    name: str
    state: str
    doing: str
    abnormal: bool
    pids: str
    cpu: str
    rss: str
    age: str


@dataclass(frozen=True)
class GridRow:
    """Readers that stand alike to every slot."""

    name: str
    cells: tuple[tuple[str, str], ...]
    """(class, mark) of each slot."""
    lag: str
    lags: bool


@dataclass(frozen=True)
class RingPart:
    """One ring, or several whose flags are the same."""

    ring: RingView
    segments: str
    writers: str
    readers: str
    count: int
    mark: str
    word: str
    role: Role
    rows: tuple[GridRow, ...]
    """Empty where it stands only in the table."""
    charts: tuple[tuple[LagTrace, LagChart, LagChart], ...]
    """(trace, wide, narrow)."""

    @property
    def well(self) -> bool:
        """It moves, or has nothing to do."""
        return self.role == "good"


CELLS = {
    "█": ("u", "U", "unread"),
    "·": ("r", "·", "read"),
    "o": ("o", "o", "never written"),
    "w": ("w", "w", "being written"),
    "!": ("x", "!", "impossible"),
}
"""Mark of the text page -> (class, mark, meaning) in a grid of the page."""


def activity_rows(members: Iterable[MemberView]) -> list[ActivityRow]:
    """Members by what they do: abnormal ones first, else in the order of the tree."""
    groups: dict[tuple[object, ...], list[MemberView]] = {}
    for member in members:
        key = (not member.abnormal, member.role, member.state, member.doing, member.stage)
        groups.setdefault(key, []).append(member)
    ordered = sorted(groups.values(), key=lambda group: not group[0].abnormal)
    return [_activity(_letters(i), group) for i, group in enumerate(ordered)]


def _activity(mark: str, group: Sequence[MemberView]) -> ActivityRow:
    first = group[0]
    notes = list(dict.fromkeys(m.note for m in group if m.note))
    words = [first.stage, first.doing if first.abnormal or not first.stage else "", *notes[:2]]
    return ActivityRow(
        mark=mark,
        members=tuple(group),
        name=names([m.label for m in group], first.role),
        state=state_words(first),
        doing=" · ".join(word for word in words if word),
        abnormal=first.abnormal,
        pids=fold(m.pid for m in group if m.pid is not None) if len(group) <= _FEW else "",
        cpu=between([m.cpu for m in group], lambda cores: f"{cores:.2f}"),
        rss=between([m.rss for m in group], size),
        age=between([m.age_s for m in group], duration),
    )


def names(labels: Sequence[str], noun: str) -> str:
    """Folded labels, or how many there are where that would be a long list."""
    folded = fold_labels(labels)
    return folded if len(folded) <= _LONG or len(labels) == 1 else plural(len(labels), noun)


def _letters(number: int) -> str:
    """``A`` .. ``Z``, ``AA`` .."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def ring_parts(rings: Iterable[RingView], traces: Sequence[LagTrace]) -> list[RingPart]:
    """Rings in the order of trouble; those whose flags are the same once, with a grid for each that fits the page."""
    groups: dict[tuple[object, ...], list[RingView]] = {}
    for ring in in_order(rings):
        groups.setdefault((*_pattern(ring), *_own(ring, traces)), []).append(ring)
    parts, healthy = [], 0
    for group in groups.values():
        well = MOTION[group[0].motion][1] == "good"
        healthy += well
        parts.append(_ring_part(group, traces, grid=not well or healthy <= _MOST_GRIDS))
    return parts


def _own(ring: RingView, traces: Sequence[LagTrace]) -> tuple[str, ...]:
    """What keeps a ring from being folded with others: it is stuck, or something is drawn of it."""
    drawn = any(_same(trace, ring) for trace in traces)
    return (ring.segment,) if drawn or MOTION[ring.motion][1] != "good" else ()


def _same(trace: LagTrace, ring: RingView) -> bool:
    return trace.segment == ring.segment.removesuffix(" (deleted)")


def _pattern(ring: RingView) -> tuple[object, ...]:
    if ring.last is None:
        return (ring.queue, ring.motion, ring.geometry)
    return (
        ring.queue,
        ring.motion,
        ring.geometry,
        ring.last.writer_index,
        tuple(reader_cells(ring.last.slots, k) for k in range(ring.geometry.n_readers)),
    )


def _ring_part(group: Sequence[RingView], traces: Sequence[LagTrace], *, grid: bool) -> RingPart:
    first = group[0]
    words, role = MOTION[first.motion]
    mark, _, word = words.partition(" ")
    writers = [ring.writer for ring in group if ring.writer]
    readers = [reader.party for ring in group for reader in ring.readers if reader.party]
    rows = _grid(first.readers, first.last.slots) if grid and first.last is not None else ()
    return RingPart(
        ring=first,
        segments=first.segment if len(group) == 1 else f"{len(group)} segments",
        writers=whom(writers) if len(writers) == 1 else names([party.label for party in writers], "writer"),
        readers=names(list(dict.fromkeys(party.label for party in readers)), "reader"),
        count=len(group),
        mark=mark,
        word=word,
        role=role,
        rows=rows,
        charts=tuple(chart_of(trace) for trace in traces if _same(trace, first)),
    )


def chart_of(trace: LagTrace) -> tuple[LagTrace, LagChart, LagChart]:
    """A trace with its charts, wide and narrow."""
    return (trace, lag_chart(trace, WIDE), lag_chart(trace, NARROW))


def _grid(readers: Sequence[ReaderView], slots: Sequence[Slot]) -> tuple[GridRow, ...]:
    rows = []
    for group in reader_groups(readers, slots):
        first, name = group[0], reader_name(group)
        waited = f" for {duration(first.unread_s)}" if first.unread_s is not None else ""
        rows.append(
            GridRow(
                name=name if len(name) <= _LONG else plural(len(group), "reader"),
                cells=tuple(CELLS[mark][:2] for mark in reader_cells(slots, first.index)),
                lag=f"{first.lag} unread{waited}" if first.lag else "all read",
                lags=bool(first.lag),
            )
        )
    return tuple(rows)


def unmatched(traces: Iterable[LagTrace], rings: Iterable[RingView]) -> list[tuple[LagTrace, LagChart, LagChart]]:
    """Charts of rings that the view does not have: those of a recording alone."""
    rings = list(rings)
    return [chart_of(trace) for trace in traces if not any(_same(trace, ring) for ring in rings)]

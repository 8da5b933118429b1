"""`ring`: each queue as a grid, one character per slot and reader, with who lags and where the writer stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllmdiag.model.ranks import fold
from vllmdiag.model.ring import RingState, Slot, SlotState
from vllmdiag.model.view import InstanceView, Motion, ReaderView, RingView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import duration, fold_labels, number, plural, size, who

MOTION: dict[Motion, tuple[str, Role]] = {
    "moving": ("✓ moving", "good"),
    "idle": ("✓ idle", "good"),
    "stuck": ("✗ stuck", "bad"),
    "full": ("✗ full", "bad"),
    "broken": ("✗ impossible flags", "bad"),
    "unknown": ("? not known", "warn"),
}
"""Mark and word of each motion."""
"""Mark and word of a motion, and its role."""
_BAND = 64
"""Slots in one row of the grid."""


def ring_text(view: InstanceView, style: Style) -> str:
    """Write the rings of an instance; those that do not move come first."""
    page = Page(style)
    headline(page, view)
    rings = in_order(view.rings)
    for ring in rings:
        page.gap()
        _ring(page, ring)
    if rings:
        page.gap()
        page.line(
            Span("█ unread   · read   o never written   w being written   ! impossible   ^ writer's next slot", "dim")
        )
    else:
        page.line("no ring seen: there is none before the workers start, and none where one process does all")
    could_not_observe(page, [*view.missing, *(hole for ring in rings for hole in ring.missing)])
    return page.text()


def in_order(rings: Iterable[RingView]) -> list[RingView]:
    """Rings that do not move first."""
    order: list[Motion] = ["broken", "full", "stuck", "unknown", "moving", "idle"]
    return sorted(rings, key=lambda ring: order.index(ring.motion))


def _ring(page: Page, ring: RingView) -> None:
    word, role = MOTION[ring.motion]
    geometry = f"{ring.geometry.chunks} slots of {size(ring.geometry.chunk_bytes)}"
    known = f" (known by {ring.geometry_known_by})" if ring.geometry_known_by else ""
    page.line(Span(ring.queue, "head"), "  ", Span(word, role), "  ", ring.summary, hang=4)
    page.line(Span(f"{ring.segment} · {geometry}{known}", "dim"), indent=2)
    page.line(f"writer {who(ring.writer)}, {writer_place(ring.last)} · {traffic(ring)}", indent=2, hang=4)
    if ring.remote_readers:
        page.line(f"{plural(ring.remote_readers, 'reader')} on other machines, over TCP: no flags to see", indent=2)
    if ring.last is None:
        return
    for problem in ring.last.problems:
        page.line(Span("! ", "bad"), problem, indent=2)
    grid(page, ring, ring.last)
    if ring.overflow_slots:
        slots = ("slot " if len(ring.overflow_slots) == 1 else "slots ") + fold(ring.overflow_slots)
        page.line(f"too large for the slot, sent over the socket: {slots}", indent=2)
    rows = [
        (f"slot {one.slot}", one.method or "(no name)", "over the socket" if one.overflow else "")
        for one in ring.peeked
    ]
    page.table(rows, indent=2)


def writer_place(last: RingState | None) -> str:
    """Where the writer stands."""
    if last is None:
        return "flags not readable"
    return "next slot not determined" if last.writer_index is None else f"next slot {last.writer_index}"


def traffic(ring: RingView) -> str:
    """What moved, and how often it was looked at."""
    if not ring.polls:
        return "not polled"
    rate = f"{number(round(ring.rate, 1))} messages/s" if ring.rate else "no message"
    still = f", still for {duration(ring.still_s)}" if ring.still_s is not None and not ring.rate else ""
    return f"{rate}{still} ({number(ring.polls)} polls in {duration(ring.polled_s)})"


def order(rings: Sequence[RingView]) -> list[RingView]:
    """Those that do not move first."""
    motions: list[Motion] = ["broken", "full", "stuck", "unknown", "moving", "idle"]
    return sorted(rings, key=lambda ring: motions.index(ring.motion))


def grid(page: Page, ring: RingView, last: RingState) -> None:
    """Draw the slots of a ring: one character a slot and reader, equal readers once."""
    for start in range(0, len(last.slots), _BAND):
        _grid(page, ring, last, start)


def _grid(page: Page, ring: RingView, last: RingState, start: int) -> None:
    slots = last.slots[start : start + _BAND]
    ruler = "".join(str(slot.index % 10) for slot in slots)
    place = "".join("^" if slot.index == last.writer_index else " " for slot in slots)
    rows: list[tuple[Text, ...]] = [(Span("slot", "dim"), Span(ruler, "dim"))]
    for group in reader_groups(ring.readers, slots):
        first = group[0]
        role: Role = "bad" if first.lag and ring.motion in {"stuck", "full"} else "plain"
        waiting = f" for {duration(first.unread_s)}" if first.unread_s is not None else ""
        lag = f"{first.lag} unread{waiting}" if first.lag else "all read"
        took = f"took {number(first.took)}" if first.took and len(group) == 1 else ""
        rows.append((Span(reader_name(group), role), reader_cells(slots, first.index), Span(lag, role), took))
    if "^" in place:
        rows.append(("", place))
    page.table(rows, indent=2)


def reader_groups(readers: Sequence[ReaderView], slots: Sequence[Slot]) -> list[list[ReaderView]]:
    """Readers that stand alike together, those that lag most first."""
    groups: dict[tuple[object, ...], list[ReaderView]] = {}
    for reader in readers:
        key = (-reader.lag, reader_cells(slots, reader.index), reader.unread_s)
        groups.setdefault(key, []).append(reader)
    return sorted(groups.values(), key=lambda group: (-group[0].lag, group[0].index))


def reader_name(group: Sequence[ReaderView]) -> str:
    """Readers by index and label, folded."""
    known = [reader.party for reader in group if reader.party]
    if len(group) == 1:
        return f"reader {group[0].index} {who(known[0])}" if known else f"reader {group[0].index}"
    indices = fold(reader.index for reader in group)
    return f"readers {indices} {fold_labels(party.label for party in known)}".rstrip()


def reader_cells(slots: Sequence[Slot], reader: int) -> str:
    """One mark for each slot, as this reader stands to it: ``█·ow!``."""
    marks = {SlotState.EMPTY: "o", SlotState.WRITING: "w", SlotState.READ: "·", SlotState.INVALID: "!"}
    return "".join(marks.get(slot.state, "█" if reader in slot.unread_by else "·") for slot in slots)

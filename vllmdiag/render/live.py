"""The picture of `watch` and `replay`: members, each ring as a grid with the lag of every reader, the last events.

Written as a page like any other, so that what a pipe gets is what the screen shows. A picture fits its screen: where
there are more rings than rows, those that do not move are kept and the others are counted.
"""

from __future__ import annotations

from vllmdiag.model.view import InstanceView, RingView
from vllmdiag.model.watch import Event, Frame

from .page import Page, Role, Span, Style, Text
from .ring import MOTION, grid, order
from .words import duration, number, plural, who

_EVENT_ROLE: dict[str, Role] = {
    "stall": "bad",
    "died": "bad",
    "long-wait": "warn",
    "problem": "warn",
    "recovered": "good",
}


def live_text(frame: Frame, style: Style, height: int | None = None) -> str:
    """Write a picture.

    Args:
        frame: what to show.
        style: its dress; the width is that of the screen.
        height: rows of the screen; None for as many as it takes.
    """
    head = _head(frame, style)
    tail = _events(frame, style)
    if frame.view is None:
        return head + tail
    members = _members(frame.view, style)
    rings = [_ring(ring, style) for ring in order(frame.view.rings)]
    room = None if height is None else height - sum(part.count("\n") for part in (head, members, tail)) - 2
    shown, left = _fitting(rings, room)
    more = Page(style)
    if left:
        more.line(Span(f"and {plural(left, 'more ring')}: no room", "dim"))
    return head + members + "".join(shown) + (more.text() if left else "") + tail


def _fitting(parts: list[str], room: int | None) -> tuple[list[str], int]:
    """As many parts as there are rows for, and how many are left out."""
    if room is None:
        return parts, 0
    shown: list[str] = []
    for part in parts:
        room -= part.count("\n")
        if room < 0:
            break
        shown.append(part)
    return shown, len(parts) - len(shown)


def _head(frame: Frame, style: Style) -> str:
    page = Page(style)
    place = f"{duration(frame.t)} of {duration(frame.of_s)}" if frame.of_s is not None else duration(frame.t)
    page.line(Span(frame.title, "head"), Span(f"  {frame.at}  {place}", "dim"))
    if frame.view is None:
        return page.text()
    if frame.status:
        page.line(Span("✗ " if frame.bad else "  ", "bad"), Span(frame.status, "bad" if frame.bad else "plain"), hang=2)
    moving = f"{number(round(frame.messages_per_s, 1))} messages/s" if frame.messages_per_s else "no message"
    still: Text = (
        Span(f"nothing has moved for {duration(frame.still_s)}", "warn" if frame.bad else "plain")
        if frame.still_s is not None
        else "moving"
    )
    page.line("  ", moving, " · ", still)
    return page.text()


def _members(view: InstanceView, style: Style) -> str:
    page = Page(style)
    page.gap()
    rows: list[tuple[Text, ...]] = []
    for member in view.members:
        if member.role in ("Helper", "ResourceTracker"):
            continue
        cpu = f"{member.cpu * 100:.0f} %" if member.cpu is not None else ""
        doing = member.stage or member.doing
        name = "  " * member.depth + member.label
        role: Role = "bad" if member.abnormal else "plain"
        rows.append((Span(name, role), str(member.pid or ""), member.state, cpu, Span(doing, role)))
    page.table(rows, header=("member", "pid", "state", "cpu", "doing"), indent=2, right=(1, 3))
    return page.text()


def _ring(ring: RingView, style: Style) -> str:
    page = Page(style)
    page.gap()
    word, role = MOTION[ring.motion]
    rate = f"{number(round(ring.rate, 1))} messages/s" if ring.rate else f"still for {duration(ring.still_s)}"
    page.line(Span(ring.queue, "head"), f" of {who(ring.writer)}  ", Span(word, role), f"  {rate}", indent=2, hang=4)
    if ring.last is not None:
        grid(page, ring, ring.last)
    return page.text()


def _events(frame: Frame, style: Style) -> str:
    if not frame.events:
        return ""
    page = Page(style)
    page.gap()
    page.table([_event_row(event) for event in frame.events], indent=2)
    return page.text()


def _event_row(event: Event) -> tuple[Text, ...]:
    return (
        Span(event.at[11:19], "dim"),
        Span(event.kind, _EVENT_ROLE.get(event.kind, "plain")),
        event.summary,
    )


def event_line(event: Event, style: Style) -> str:
    """One event as a line, for a pipe."""
    page = Page(style)
    page.line(event.at, "  ", Span(event.kind.ljust(9), _EVENT_ROLE.get(event.kind, "plain")), "  ", event.summary)
    return page.text()


def title(view: InstanceView) -> str:
    """Which server this is, in words."""
    facts = [
        f"vLLM {view.vllm_version}" if view.vllm_version else "vLLM of unknown version",
        f"port {view.port}" if view.port else "",
        view.model or "",
        view.node,
    ]
    return " · ".join(fact for fact in facts if fact)

"""`shm`: capacity as the target sees it, who holds what, memory shared and own, orphans."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.view import InstanceView, MemberView, MountView, Removal, SegmentView

from .page import Page, Role, Span, Style, Text
from .parts import could_not_observe, headline
from .words import duration, plural, size, whom

_SMALL = 1 << 20
"""Segments smaller than this are folded where they are alike."""
_TIGHT = 0.9
"""A mount fuller than this is marked."""


def shm_text(view: InstanceView, style: Style) -> str:
    """Write mounts, segments of the instance, memory of its members, and what nobody holds."""
    page = Page(style)
    headline(page, view)
    _mounts(page, view.mounts)
    held = [segment for segment in view.segments if not segment.orphan]
    if held:
        page.section("segments")
        _segments(page, held)
    _memory(page, view.members)
    orphans = [segment for segment in view.segments if segment.orphan]
    if orphans:
        page.section(
            f"held by nobody: {plural(len(orphans), 'segment')}, {size(sum(s.resident or 0 for s in orphans))}"
        )
        _orphans(page, orphans)
        removable = sum(segment.removable for segment in orphans)
        if removable:
            page.line(
                Span("next  ", "dim"), f"vllmdiag shm clean   (shows what would be removed: {removable})", indent=2
            )
    could_not_observe(page, view.missing)
    return page.text()


def orphans_text(view: InstanceView, style: Style) -> str:
    """Write what `shm clean` would remove, and what it would keep and why."""
    page = Page(style)
    orphans = [segment for segment in view.segments if segment.orphan]
    removable = [segment for segment in orphans if segment.removable]
    total = size(sum(segment.resident or 0 for segment in removable))
    page.line(Span(f"{plural(len(removable), 'segment')} of vLLM held by nobody, {total}", "head"))
    _orphans(page, orphans)
    if removable:
        page.line(Span("next  ", "dim"), "vllmdiag shm clean --yes   (removes those that may go)", indent=2)
    could_not_observe(page, view.missing)
    return page.text()


def removals_text(removals: Sequence[Removal], style: Style) -> str:
    """Write what `shm clean --yes` did."""
    page = Page(style)
    removed = [removal for removal in removals if removal.removed]
    freed = size(sum(removal.freed for removal in removed))
    page.line(Span(f"{plural(len(removed), 'segment')} removed, {freed} freed", "head"))
    page.table([("removed" if one.removed else Span("kept", "warn"), one.name, one.why) for one in removals], indent=2)
    return page.text()


def _orphans(page: Page, orphans: Sequence[SegmentView]) -> None:
    rows = [
        (one.name, one.kind, size(one.resident), duration(one.age_s), "may go" if one.removable else "kept", one.why)
        for one in sorted(orphans, key=lambda segment: (-(segment.resident or 0), segment.name))
    ]
    page.table(rows, header=("segment", "kind", "resident", "age", "clean", "why"), indent=2, right={2, 3})


def _mounts(page: Page, mounts: Sequence[MountView]) -> None:
    if not mounts:
        return
    page.gap()
    rows: list[tuple[Text, ...]] = []
    for mount in mounts:
        used = 1 - mount.free / mount.size if mount.size else 0.0
        role: Role = "bad" if used > _TIGHT else "plain"
        capacity = Span(f"{used:.0%} of {size(mount.size)} used, {size(mount.free)} free", role)
        rows.append((mount.path, capacity, f"as seen by {whom(mount.seen_by)}" if mount.seen_by else "", mount.note))
    page.table(rows)


def _segments(page: Page, segments: Sequence[SegmentView]) -> None:
    rows: list[tuple[Text, ...]] = []
    for group in _groups(segments, page.style):
        first = group[0]
        holders = whom(first.holders) if first.holders else "not known"
        outside = f", outside: {whom(first.outsiders)}" if first.outsiders else ""
        name = f"{first.name} (deleted)" if first.deleted else first.name
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        total, resident = sum(s.size for s in group), sum(s.resident or 0 for s in group)
        rows.append((first.kind, name + more, size(total), size(resident), holders + outside, first.why))
    page.table(rows, header=("kind", "segment", "size", "resident", "held by", "note"), indent=2, right={2, 3})


def _groups(segments: Sequence[SegmentView], style: Style) -> list[list[SegmentView]]:
    """Small segments of one kind, one fate and the same holders together: a server has dozens of semaphores."""
    groups: dict[object, list[SegmentView]] = {}
    for segment in segments:
        small = segment.size < _SMALL and not style.verbose
        alike = (segment.kind, segment.deleted, segment.holders, segment.outsiders, segment.why)
        groups.setdefault(alike if small else segment.name, []).append(segment)
    return list(groups.values())


def _memory(page: Page, members: Sequence[MemberView]) -> None:
    rows = [
        (member.label, size(member.rss), size(member.pss), size(member.shmem))
        for member in members
        if member.pss is not None
    ]
    if not rows:
        return
    page.section("memory")
    page.table(rows, header=("member", "rss", "pss", "of it shared memory"), indent=2, right={1, 2, 3})
    if page.style.verbose:
        page.line("RSS counts a shared page in every process, PSS its share: only PSS may be added up.", indent=2)

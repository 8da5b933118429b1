"""`diff`: what differs, the verdict first, then rank by rank; equal changes of several ranks are said once."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.diff import Change, Changes, CounterChange, Diff

from .page import Page, Role, Span, Style, Text
from .words import duration, fold_labels, number

_FATES: dict[str, tuple[str, Role]] = {
    "same": ("~", "warn"),
    "restarted": ("!", "bad"),
    "appeared": ("+", "good"),
    "gone": ("-", "bad"),
}
_LONGEST = 160


def diff_text(diff: Diff, style: Style) -> str:
    """Write the difference for people; one line where there is none."""
    page = Page(style)
    page.line(Span("- ", "bad"), _side(diff.before.source, diff.before.observed_at, diff.before.summary))
    page.line(Span("+ ", "good"), _side(diff.after.source, diff.after.observed_at, diff.after.summary))
    if diff.apart_s:
        words = f"{duration(abs(diff.apart_s))} {'later' if diff.apart_s >= 0 else 'EARLIER: the order is reversed'}"
        page.line(words, indent=2)
    if diff.not_compared:
        page.line(Span("? ", "warn"), diff.not_compared)
    if not diff.differs:
        page.gap()
        page.line(Span("no difference", "good"))
        return page.text()
    if diff.instance:
        page.section("instance")
        _changes(page, diff.instance, indent=2)
    for title, things in (
        ("processes", diff.processes),
        ("rings", diff.rings),
        ("endpoints", diff.endpoints),
        ("devices", diff.devices),
    ):
        if things:
            page.section(title)
            _things(page, things)
    if diff.counters:
        page.section("counters")
        page.table([_counter(c) for c in diff.counters], indent=2, right={2, 4})
    return page.text()


def _side(source: str, at: str, summary: str) -> str:
    return " · ".join(text for text in (source, at, summary) if text)


def _things(page: Page, things: Sequence[Changes]) -> None:
    """Those that changed in the same way stand together; the pids of each are told where they are few."""
    groups: dict[tuple[str, tuple[Change, ...]], list[Changes]] = {}
    for thing in things:
        groups.setdefault((thing.fate, thing.changes), []).append(thing)
    for (fate, changes), same in groups.items():
        mark, role = _FATES[fate]
        pids = _pids(same[0]) if len(same) == 1 else ""
        names = fold_labels(thing.name for thing in same)
        page.line(Span(f"{mark} ", role), names, pids, "" if fate == "same" else f" {fate}", indent=2)
        _changes(page, changes, indent=6)


def _pids(thing: Changes) -> str:
    before, after = thing.pid_before, thing.pid_after
    if before is None and after is None:
        return ""
    both = [str(pid) for pid in (before, after) if pid is not None]
    return f" (pid {both[0] if len(set(both)) == 1 else ' → '.join(both)})"


def _changes(page: Page, changes: Sequence[Change], indent: int) -> None:
    rows: list[tuple[Text, ...]] = [
        (change.what, _value(change.before, page.style), "→", _value(change.after, page.style), change.detail)
        for change in changes
    ]
    page.table(rows, indent=indent)


def _value(text: str | None, style: Style) -> Text:
    if text is None:
        return Span("nothing", "dim")
    return text if style.verbose or len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _counter(change: CounterChange) -> tuple[Text, ...]:
    engine = f"engine {change.engine}" if change.engine else ""
    first, last = ("nothing" if value is None else number(value) for value in (change.before, change.after))
    return change.name, engine, first, "→", last, f"{number(change.per_s)}/s" if change.per_s is not None else ""

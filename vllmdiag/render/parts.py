"""What several pages share: the headline of an instance and the section of what could not be observed."""

from __future__ import annotations

from collections.abc import Iterable

from vllmdiag.model.base import Missing
from vllmdiag.model.view import InstanceView

from .page import Page, Span
from .words import duration, fold_labels

_MOST_HOLES = 6
"""More names than this are counted, not listed, unless asked for (-v); JSON has them all."""


def headline(page: Page, view: InstanceView) -> None:
    """One line that says which instance this is and how long it was watched."""
    if not view.members:
        page.line(Span("no vLLM runs here", "head"))
        return
    facts = [
        f"vLLM {view.vllm_version}" if view.vllm_version else "vLLM of unknown version",
        f"port {view.port}" if view.port else "",
        view.model or "",
        view.node,
        f"watched for {duration(view.window_s)}" if view.window_s else "",
        view.observed_at if page.style.verbose else "",
    ]
    page.line(Span(" · ".join(fact for fact in facts if fact), "head"))


def folded_holes(missing: Iterable[Missing]) -> list[tuple[list[str], str, str]]:
    """What is not known by its reason: (names, why, what would make it known)."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for hole in missing:
        groups.setdefault((hole.why, hole.next), {})[hole.what] = None
    return [(list(names), why, after) for (why, after), names in groups.items()]


def could_not_observe(page: Page, missing: Iterable[Missing]) -> None:
    """What stayed dark, why, and what would light it; equal reasons are said once. Nothing where nothing is missing."""
    holes = folded_holes(missing)
    if not holes:
        return
    page.section("could not observe")
    for names, why, after in holes:
        shown = names if page.style.verbose or len(names) <= _MOST_HOLES else names[: _MOST_HOLES - 1]
        more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
        page.line(Span("? ", "warn"), f"{fold_labels(shown)}{more}: {why}", indent=2, hang=4)
        if after:
            page.line(Span("next  ", "dim"), Span(after, whole=True), indent=4, hang=10)

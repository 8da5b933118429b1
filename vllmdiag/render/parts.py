"""What several pages share: the headline of an instance and the section of what could not be observed."""

from __future__ import annotations

from collections.abc import Iterable

from vllmdiag.model.base import Missing
from vllmdiag.model.view import InstanceView

from .page import Page, Span
from .words import duration, fold_labels


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


def could_not_observe(page: Page, missing: Iterable[Missing]) -> None:
    """What stayed dark, why, and what would light it; equal reasons are said once. Nothing where nothing is missing."""
    groups: dict[tuple[str, str], list[str]] = {}
    for hole in missing:
        groups.setdefault((hole.why, hole.next), []).append(hole.what)
    if not groups:
        return
    page.section("could not observe")
    for (why, after), whats in groups.items():
        page.line(Span("? ", "warn"), f"{fold_labels(dict.fromkeys(whats))}: {why}", indent=2, hang=4)
        if after:
            page.line(Span("next  ", "dim"), Span(after, whole=True), indent=4, hang=10)

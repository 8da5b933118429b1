"""`stacks`: what each process executes, equal stacks once, the odd ones first; or all of them as one tree."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.stacks import MergedStacks, MergedThread, StackNode
from vllmdiag.model.view import InstanceView, StackView

from .page import Page, Span, Style
from .parts import could_not_observe, headline
from .words import between, fold_labels, plural

_FRAMES = 12
"""Innermost frames shown without -v: what decides is near the top, the rest is how Python got there."""


def stacks_text(view: InstanceView, style: Style) -> str:
    """Write the stacks, grouped by equal frames; small groups first, for they are the ones that differ."""
    page = Page(style)
    headline(page, view)
    shown = [stack for stack in view.stacks if style.verbose or stack.main or stack.on_cpu or stack.meaning]
    for group in _groups(shown):
        page.gap()
        _group(page, group)
    rest = len(view.stacks) - len(shown)
    if rest:
        page.gap()
        page.line(Span(f"{plural(rest, 'other thread')} asleep in nothing we know: -v shows them", "dim"))
    if not view.stacks:
        page.line("no stack seen")
    could_not_observe(page, view.missing)
    return page.text()


def _groups(stacks: Sequence[StackView]) -> list[list[StackView]]:
    groups: dict[tuple[object, ...], list[StackView]] = {}
    for stack in stacks:
        frames = tuple((frame.name, frame.file, frame.line) for frame in stack.frames)
        groups.setdefault((not stack.main, stack.thread, frames, stack.meaning, stack.same == stack.dumps), []).append(
            stack
        )
    return [group for _, group in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[1][0].label))]


def _group(page: Page, group: Sequence[StackView]) -> None:
    first = group[0]
    name = (
        f"{first.label} (pid {first.pid})"
        if len(group) == 1
        else f"{fold_labels(s.label for s in group)} ({len(group)})"
    )
    cpu = between((stack.cpu for stack in group), lambda cores: f"{cores:.2f}")
    facts = [
        first.thread,
        f"same in {first.same} of {plural(first.dumps, 'dump')}",
        f"cpu {cpu}" if cpu else "",
        "on CPU" if any(stack.on_cpu for stack in group) else "",
        "holds the GIL" if any(stack.owns_gil for stack in group) else "",
    ]
    page.line(Span(name, "head"), "  ", " · ".join(fact for fact in facts if fact))
    if first.meaning:
        page.line(first.meaning, indent=2)
    limit = len(first.frames) if page.style.verbose else _FRAMES
    for frame in first.frames[:limit]:
        page.line(f"{frame.name} ({frame.file}:{frame.line})", indent=4)
    if len(first.frames) > limit:
        page.line(Span(f"… {len(first.frames) - limit} more", "dim"), indent=4)


# -- merged -----------------------------------------------------------------------------------------------------------


def merged_text(merged: MergedStacks, style: Style) -> str:
    """Write the trees, outermost frames first; at each parting the smallest group first, for it is the odd one."""
    page = Page(style)
    for thread in merged.threads:
        _tree(page, thread)
    if merged.left_out:
        page.gap()
        page.line(Span(f"{plural(merged.left_out, 'other thread')} asleep in nothing we know: -v shows them", "dim"))
    if not merged.threads:
        page.line("no stack seen")
    could_not_observe(page, merged.missing)
    return page.text()


def _tree(page: Page, thread: MergedThread) -> None:
    tree = thread.tree
    page.section(f"{tree.thread}: {plural(len(tree.labels), 'process')}")
    if thread.odd:
        page.line(
            Span("! ", "warn"),
            f"{fold_labels(thread.odd)} {'parts' if len(thread.odd) == 1 else 'part'} from the others",
            indent=2,
        )
    for node in tree.nodes:
        _branch(page, node, 2, set(thread.odd))


def _branch(page: Page, node: StackNode, indent: int, odd: set[str]) -> None:
    count = f" ({len(node.labels)})" if len(node.labels) > 1 else ""
    apart = set(node.labels) <= odd
    page.line(Span(f"{fold_labels(node.labels)}{count}", "warn" if apart else "head"), indent=indent)
    left_out = 0 if page.style.verbose else max(0, len(node.frames) - _FRAMES)
    if left_out:
        page.line(Span(f"… {left_out} more", "dim"), indent=indent + 2)
    for frame in node.frames[left_out:]:
        page.line(f"{frame.name} ({frame.file}:{frame.line})", indent=indent + 2)
    if node.meaning:
        page.line(Span(f"-> {node.meaning}", "dim"), indent=indent + 2)
    for child in node.children:
        _branch(page, child, indent + 2, odd)

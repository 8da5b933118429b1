"""Stacks merged into trees: one for all main threads, one for each name of another thread."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.process import Frame
from vllmdiag.model.stacks import StackNode, StackTree
from vllmdiag.model.view import StackView

MAIN = "main threads"
_DEEPEST = 40
"""Partings above one another; below them every stack stands alone. No honest set of stacks comes near."""

_Stack = tuple[StackView, tuple[Frame, ...]]
"""A stack, and its frames with the outermost first."""


def stack_trees(stacks: Sequence[StackView]) -> tuple[StackTree, ...]:
    """Merge stacks: main threads first, then the other threads in the order of their first.

    Args:
        stacks: threads of all processes; one without frames is left out.
    """
    groups: dict[str, list[_Stack]] = {}
    for stack in sorted(stacks, key=lambda s: not s.main):
        if stack.frames:
            groups.setdefault(MAIN if stack.main else stack.thread, []).append((stack, stack.frames[::-1]))
    return tuple(
        StackTree(thread=name, main=group[0][0].main, labels=_labels(group), nodes=_nodes(group, 0, 0))
        for name, group in groups.items()
    )


def _nodes(stacks: Sequence[_Stack], start: int, depth: int) -> tuple[StackNode, ...]:
    """Nodes for what the stacks have from frame `start` on."""
    groups: dict[object, list[_Stack]] = {}
    for number, one in enumerate(stacks):
        if len(one[1]) > start:
            groups.setdefault(one[1][start] if depth < _DEEPEST else number, []).append(one)
    nodes = [_node(group, start, depth) for group in groups.values()]
    return tuple(sorted(nodes, key=lambda node: len(node.labels)))


def _node(stacks: Sequence[_Stack], start: int, depth: int) -> StackNode:
    frames = stacks[0][1]
    end = start + 1
    while len(frames) > end and all(len(other) > end and other[end] == frames[end] for _, other in stacks):
        end += 1
    ended = [stack for stack, other in stacks if len(other) == end]
    return StackNode(
        frames=frames[start:end],
        labels=_labels(stacks),
        meaning=next((stack.meaning for stack in ended if stack.meaning), ""),
        children=_nodes(stacks, end, depth + 1),
    )


def _labels(stacks: Sequence[_Stack]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stack.label for stack, _ in stacks))

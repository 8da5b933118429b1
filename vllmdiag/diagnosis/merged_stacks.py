"""What `stacks --merge` shows: the stacks of an instance as trees, and which ranks part from the others in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllmdiag.model.stacks import MergedStacks, MergedThread, StackNode
from vllmdiag.model.view import InstanceView, StackView

from .stack_tree import stack_trees


def merged(view: InstanceView, every_thread: bool = False) -> MergedStacks:
    """The stacks of an instance as trees.

    Args:
        view: of the instance.
        every_thread: also threads that are asleep in nothing known.
    """
    shown = [s for s in view.stacks if every_thread or _telling(s)]
    return MergedStacks(
        observed_at=view.observed_at,
        window_s=view.window_s,
        node=view.node,
        threads=tuple(MergedThread(tree=tree, odd=odd_ones(tree.nodes)) for tree in stack_trees(shown)),
        left_out=sum(bool(s.frames) for s in view.stacks) - sum(bool(s.frames) for s in shown),
        missing=view.missing,
    )


def _telling(stack: StackView) -> bool:
    return stack.main or stack.on_cpu or bool(stack.meaning)


def odd_ones(nodes: Sequence[StackNode]) -> tuple[str, ...]:
    """Processes that part from most of those that have come the same way; none where no branch has the most."""
    return tuple(dict.fromkeys(_parted(nodes, whole=False)))


def _parted(nodes: Sequence[StackNode], whole: bool) -> Iterator[str]:
    """At the top stand processes of different roles, which have nothing in common to part from."""
    total = sum(len(node.labels) for node in nodes)
    most = max(nodes, key=lambda node: len(node.labels), default=None)
    for node in nodes:
        if whole and node is not most and most is not None and len(most.labels) * 2 > total:
            yield from node.labels
        else:
            yield from _parted(node.children, whole=True)

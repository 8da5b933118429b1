"""Stacks of many processes as one tree of frames, so that the rank that parts from the others is seen at once."""

from __future__ import annotations

from .base import Fact, Missing
from .process import Frame

STACKS_SCHEMA = "vllmdiag.stacks/1"


class StackNode(Fact, frozen=True, kw_only=True):
    """A run of frames that the same processes have, and where they part after it."""

    frames: tuple[Frame, ...]
    """Outermost first, at least one."""
    labels: tuple[str, ...]
    """Processes that have these frames, in the order of the instance."""
    meaning: str = ""
    """What the signature says of a stack that ends here; empty where none ends, or none is known."""
    children: tuple[StackNode, ...] = ()
    """Fewest processes first: those are the odd ones."""


class StackTree(Fact, frozen=True, kw_only=True):
    """One thread, by its name, over all processes that have it."""

    thread: str
    main: bool = False
    labels: tuple[str, ...] = ()
    nodes: tuple[StackNode, ...] = ()
    """By outermost frame; fewest processes first."""


class MergedThread(Fact, frozen=True, kw_only=True):
    """One tree, and who parts from the others in it."""

    tree: StackTree
    odd: tuple[str, ...] = ()
    """Processes that part from most of those that have come the same way."""


class MergedStacks(Fact, frozen=True, kw_only=True):
    """All stacks of an instance, merged."""

    schema: str = STACKS_SCHEMA
    observed_at: str = ""
    window_s: float = 0.0
    node: str = ""
    threads: tuple[MergedThread, ...] = ()
    left_out: int = 0
    """Threads that are asleep in nothing known."""
    missing: tuple[Missing, ...] = ()

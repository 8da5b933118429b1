"""What a report draws beside the Diagnosis and the InstanceView: who waits for whom, how readers lagged over time."""

from __future__ import annotations

from .base import Fact
from .diagnosis import Diagnosis
from .stacks import StackTree
from .view import InstanceView


class GraphNode(Fact, frozen=True, kw_only=True):
    """Actors of one role that do the same thing, as one node of the wait-for graph."""

    id: int
    """Index in `WaitGraph.nodes`."""
    role: str
    labels: tuple[str, ...]
    """Names of the actors that it stands for, at least one."""
    pids: tuple[int, ...] = ()
    """Of those that have one here."""
    doing: str = ""
    root: bool = False
    """What the waits lead to: the subject of a verdict that is a fault."""


class GraphEdge(Fact, frozen=True, kw_only=True):
    """The actors of `waiter` cannot go on before those of `on` do something."""

    waiter: int
    """Id of a node."""
    on: int
    why: str
    """The evidence in a few words; of several waits that were folded, the first."""
    layer: int = 0
    count: int = 1
    """Waits that it stands for."""


class WaitGraph(Fact, frozen=True, kw_only=True):
    """Who waits for whom."""

    nodes: tuple[GraphNode, ...] = ()
    edges: tuple[GraphEdge, ...] = ()


class LagTrace(Fact, frozen=True, kw_only=True):
    """How many messages each reader of one ring had not taken, over time."""

    segment: str
    """File name in /dev/shm, as in `RingView.segment`."""
    queue: str = "ring"
    readers: tuple[str, ...] = ()
    """Labels by reader index."""
    slots: int = 0
    """Slots of the ring: no lag is larger."""
    points: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """(seconds, unread messages by reader from then on), in order of time."""
    start_s: float = 0.0
    """When watching began, and when it ended."""
    end_s: float = 0.0
    source: str = ""
    """Where it comes from: ``the window``, or the name of a recording."""


class Report(Fact, frozen=True, kw_only=True):
    """Everything that the page of a report shows."""

    diagnosis: Diagnosis | None = None
    """None for a recording of rings alone: there is nothing to judge."""
    view: InstanceView | None = None
    graph: WaitGraph = WaitGraph()
    traces: tuple[LagTrace, ...] = ()
    stacks: tuple[StackTree, ...] = ()

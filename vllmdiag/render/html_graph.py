"""The wait-for graph laid out on a plane: columns from who waits to what it leads to, nothing on top of anything else.

A layered layout. A node stands one layer behind the last that waits for it; between two layers stands a column of words
that say why, one box for each wait. A wait that spans several layers keeps a lane free in each column that it passes.
Every box of a column has its own place in it, so boxes cannot overlap. `layout` is drawn from left to right on a wide
page and from top to bottom on a narrow one: the same columns, turned.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from vllmdiag.model.ranks import fold
from vllmdiag.model.report import GraphEdge, GraphNode, WaitGraph

from .words import fold_labels, plural

LINE = 16.0
"""Height of a line of text."""
_PAD = 10.0
_NODE_CHARS, _WHY_CHARS = 22, 17
_NODE_CHAR, _WHY_CHAR = 8.2, 6.6
"""Width of a character, at least that of a wide one: there are no fonts to measure here."""
_LANE = 10.0
_GAP_IN, _GAP_BETWEEN = 14.0, 18.0
"""Between two boxes of a column, and between two columns."""
_MARGIN = 4.0
_SWEEPS = 4

Kind = Literal["node", "why", "lane"]


@dataclass(frozen=True)
class Line:
    """One line of text in a box."""

    text: str
    part: Literal["tag", "name", "pid", "doing", "why"]


@dataclass(frozen=True)
class Box:
    """A rectangle of its own: a node, the words of a wait, or the lane of a wait that passes."""

    kind: Kind
    width: float
    height: float
    lines: tuple[Line, ...] = ()
    node: GraphNode | None = None
    edge: int = -1
    """Index of the wait in the graph; -1 for a node."""
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Curve:
    """The way of one wait: path data of its pieces, and the three corners of the arrow at its end."""

    pieces: tuple[str, ...]
    arrow: str
    backwards: bool
    """It closes a cycle."""


@dataclass(frozen=True)
class Drawing:
    """What is drawn, in units of CSS pixels."""

    width: float
    height: float
    boxes: tuple[Box, ...] = ()
    curves: tuple[Curve, ...] = ()


@dataclass
class _Columns:
    """Boxes by column, and who is connected to whom between neighbouring columns."""

    boxes: list[Box] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    before: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, box: Box, column: int) -> int:
        self.boxes.append(box)
        self.column.append(column)
        return len(self.boxes) - 1

    def connect(self, left: int, right: int) -> None:
        self.after[left].append(right)
        self.before[right].append(left)


def layout(graph: WaitGraph, *, down: bool = False) -> Drawing:
    """Lay a graph out.

    Args:
        graph: nodes with ids 0, 1, ...; edges between different ones; cycles may be in it.
        down: from top to bottom instead of from left to right.

    Returns:
        Boxes that do not overlap, in a plane that holds them all, and a curve for each edge, in the order of the graph.
    """
    if not graph.nodes:
        return Drawing(width=0.0, height=0.0)
    backwards = _closing(graph)
    layers = _layers(graph, backwards)
    columns = _Columns()
    places = {node.id: columns.add(_node_box(node), 2 * layers[node.id]) for node in graph.nodes}
    chains = []
    for i, edge in enumerate(graph.edges):
        left, right = (edge.on, edge.waiter) if i in backwards else (edge.waiter, edge.on)
        first, last = 2 * layers[left] + 1, 2 * layers[right]
        lane = Box(kind="lane", width=_LANE, height=_LANE, edge=i)
        inner = [columns.add(_why_box(edge, i), first), *(columns.add(lane, c) for c in range(first + 1, last))]
        chain = [places[left], *inner, places[right]]
        for a, b in pairwise(chain):
            columns.connect(a, b)
        chains.append(chain)
    boxes, width, height = _placed(columns, _ordered(columns), down=down)
    return Drawing(
        width=width,
        height=height,
        boxes=tuple(box for box in boxes if box.kind != "lane"),
        curves=tuple(
            _curve([boxes[k] for k in chain], backwards=i in backwards, down=down) for i, chain in enumerate(chains)
        ),
    )


def _closing(graph: WaitGraph) -> set[int]:
    """Edges that close a cycle, found in depth from the nodes that nobody waits on, then from the others."""
    leaving: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, edge in enumerate(graph.edges):
        leaving[edge.waiter].append((i, edge.on))
    awaited = {edge.on for edge in graph.edges}
    order = sorted((node.id for node in graph.nodes), key=lambda n: n in awaited)
    closing: set[int] = set()
    done: set[int] = set()
    for start in order:
        if start in done:
            continue
        path, steps = {start}, [(start, iter(leaving[start]))]
        while steps:
            node, rest = steps[-1]
            step = next(rest, None)
            if step is None:
                steps.pop()
                path.discard(node)
                done.add(node)
            elif step[1] in path:
                closing.add(step[0])
            elif step[1] not in done:
                path.add(step[1])
                steps.append((step[1], iter(leaving[step[1]])))
    return closing


def _layers(graph: WaitGraph, backwards: set[int]) -> dict[int, int]:
    """Layer of each node: the length of the longest way to it."""
    layers = {node.id: 0 for node in graph.nodes}
    ways = [(edge.on, edge.waiter) if i in backwards else (edge.waiter, edge.on) for i, edge in enumerate(graph.edges)]
    for _ in graph.nodes:  # without cycles no way is longer than there are nodes
        for left, right in ways:
            layers[right] = max(layers[right], layers[left] + 1)
    return layers


def _ordered(columns: _Columns) -> list[list[int]]:
    """Boxes of each column in an order that lets few curves cross: by the mean place of their neighbours."""
    rows: list[list[int]] = [[] for _ in range(max(columns.column) + 1)]
    for box, column in enumerate(columns.column):
        rows[column].append(box)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        neighbours = columns.before if forth else columns.after
        for row in rows if forth else reversed(rows):
            place = {box: i for other in rows for i, box in enumerate(other)}
            means = {
                box: sum(place[n] for n in neighbours[box]) / len(neighbours[box])
                if neighbours[box]
                else float(place[box])
                for box in row
            }
            row.sort(key=means.__getitem__)
    return rows


def _placed(columns: _Columns, rows: Sequence[Sequence[int]], *, down: bool) -> tuple[list[Box], float, float]:
    """Every box at its place; width and height of the whole."""

    def along(box: Box) -> float:
        return box.height if down else box.width

    def across(box: Box) -> float:
        return box.width if down else box.height

    stacks = [sum(across(columns.boxes[b]) + _GAP_IN for b in row) - _GAP_IN for row in rows]
    middle = max(stacks) / 2 + _MARGIN
    boxes = list(columns.boxes)
    at = _MARGIN
    for row, stack in zip(rows, stacks, strict=True):
        thick = max((along(columns.boxes[b]) for b in row), default=0.0)
        place = middle - stack / 2
        for b in row:
            box = columns.boxes[b]
            if box.kind == "lane":  # all through the column: what passes bends between columns only
                box = replace(box, width=box.width if down else thick, height=thick if down else box.height)
            start = at + (thick - along(box)) / 2
            boxes[b] = replace(box, x=place if down else start, y=start if down else place)
            place += across(box) + _GAP_IN
        at += thick + _GAP_BETWEEN
    length, breadth = at - _GAP_BETWEEN + _MARGIN, 2 * middle
    return boxes, (breadth if down else length), (length if down else breadth)


def _curve(chain: Sequence[Box], *, backwards: bool, down: bool) -> Curve:
    """Pieces between the boxes of a chain; a lane is crossed in a straight line."""
    pieces = []
    for left, right in pairwise(chain):
        (x1, y1), (x2, y2) = _end(left, down=down), _begin(right, down=down)
        if left.kind == "lane":
            x0, y0 = _begin(left, down=down)
            pieces.append(f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}")
        bend = f"{x1:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {(y1 + y2) / 2:.1f}"
        if not down:
            bend = f"{(x1 + x2) / 2:.1f} {y1:.1f} {(x1 + x2) / 2:.1f} {y2:.1f}"
        pieces.append(f"M{x1:.1f} {y1:.1f}C{bend} {x2:.1f} {y2:.1f}")
    x, y = _end(chain[0], down=down) if backwards else _begin(chain[-1], down=down)
    back = 8.0 if backwards else -8.0
    wings = [(x - 4, y + back), (x + 4, y + back)] if down else [(x + back, y - 4), (x + back, y + 4)]
    arrow = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *wings])
    return Curve(pieces=tuple(pieces), arrow=arrow, backwards=backwards)


def _begin(box: Box, *, down: bool) -> tuple[float, float]:
    return (box.x + box.width / 2, box.y) if down else (box.x, box.y + box.height / 2)


def _end(box: Box, *, down: bool) -> tuple[float, float]:
    return (box.x + box.width / 2, box.y + box.height) if down else (box.x + box.width, box.y + box.height / 2)


def _node_box(node: GraphNode) -> Box:
    name = fold_labels(node.labels)
    if len(node.labels) > 1 and len(name) > 2 * _NODE_CHARS:
        name = plural(len(node.labels), node.role)
    pids = f"pid {fold(node.pids)}" if node.pids else ""
    if len(node.labels) > 1:
        pids = f"{len(node.labels)} processes"
    lines = [
        *([Line("first blocker", "tag")] if node.root else []),
        *(Line(text, "name") for text in _wrapped(name, _NODE_CHARS)),
        *([Line(pids, "pid")] if pids else []),
        *(Line(text, "doing") for text in _wrapped(node.doing, _NODE_CHARS)),
    ]
    return _box("node", lines, _NODE_CHAR, node=node)


def _why_box(edge: GraphEdge, index: int) -> Box:
    lines = [Line(text, "why") for text in _wrapped(edge.why or "waits", _WHY_CHARS)]
    return _box("why", lines, _WHY_CHAR, edge=index)


def _box(kind: Kind, lines: Sequence[Line], char: float, *, node: GraphNode | None = None, edge: int = -1) -> Box:
    pad = _PAD if kind == "node" else 3.0
    return Box(
        kind=kind,
        width=max(len(line.text) for line in lines) * char + 2 * pad,
        height=len(lines) * LINE + 2 * pad,
        lines=tuple(lines),
        node=node,
        edge=edge,
    )


def _wrapped(text: str, chars: int) -> list[str]:
    """At most five lines; words that are too long for one are broken, what is left is cut off."""
    return textwrap.wrap(text, chars, max_lines=5, placeholder=" …")

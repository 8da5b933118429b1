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

from .page import clean, columns
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
    begin: float = 0.0
    """Where its column begins and ends: between two columns a curve may bend, within one it runs straight."""
    end: float = 0.0


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
    grid = _Columns()
    places = {node.id: grid.add(_node_box(node), 2 * layers[node.id]) for node in graph.nodes}
    chains = []
    for i, edge in enumerate(graph.edges):
        left, right = (edge.on, edge.waiter) if i in backwards else (edge.waiter, edge.on)
        first, last = 2 * layers[left] + 1, 2 * layers[right]
        lane = Box(kind="lane", width=_LANE, height=_LANE, edge=i)
        inner = [grid.add(_why_box(edge, i), first), *(grid.add(lane, c) for c in range(first + 1, last))]
        chain = [places[left], *inner, places[right]]
        for a, b in pairwise(chain):
            grid.connect(a, b)
        chains.append(chain)
    boxes, width, height = _placed(grid, _ordered(grid), down=down)
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


def _ordered(grid: _Columns) -> list[list[int]]:
    """Boxes of each column in an order that lets few curves cross: by the mean place of their neighbours."""
    rows: list[list[int]] = [[] for _ in range(max(grid.column) + 1)]
    for box, column in enumerate(grid.column):
        rows[column].append(box)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        neighbours = grid.before if forth else grid.after
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


def _placed(grid: _Columns, rows: Sequence[Sequence[int]], *, down: bool) -> tuple[list[Box], float, float]:
    """Every box at its place; width and height of the whole."""

    def along(box: Box) -> float:
        return box.height if down else box.width

    def across(box: Box) -> float:
        return box.width if down else box.height

    stacks = [sum(across(grid.boxes[b]) + _GAP_IN for b in row) - _GAP_IN for row in rows]
    middle = max(stacks) / 2 + _MARGIN
    boxes = list(grid.boxes)
    at = _MARGIN
    for row, stack in zip(rows, stacks, strict=True):
        thick = max((along(grid.boxes[b]) for b in row), default=0.0)
        place = middle - stack / 2
        for b in row:
            box = grid.boxes[b]
            start = at + (thick - along(box)) / 2
            x, y = (place, start) if down else (start, place)
            boxes[b] = replace(box, x=x, y=y, begin=at, end=at + thick)
            place += across(box) + _GAP_IN
        at += thick + _GAP_BETWEEN
    length, breadth = at - _GAP_BETWEEN + _MARGIN, 2 * middle
    return boxes, (breadth if down else length), (length if down else breadth)


def _curve(chain: Sequence[Box], *, backwards: bool, down: bool) -> Curve:
    """Straight through the columns of the chain, and bent between them."""
    pieces = []
    for left, right in pairwise(chain):
        (_, out, leave), (to, _, come) = _sides(left, down=down), _sides(right, down=down)
        half = (left.end + right.begin) / 2
        bend = [(left.end, leave), (half, leave), (half, come), (right.begin, come)]
        (x, y), *rest = [(across, along) if down else (along, across) for along, across in bend]
        pieces += _straight(out, left.end, leave, down=down)
        pieces.append(f"M{x:.1f} {y:.1f}C" + " ".join(f"{a:.1f} {b:.1f}" for a, b in rest))
        pieces += _straight(right.begin, to, come, down=down)
    near, far, side = _sides(chain[0] if backwards else chain[-1], down=down)
    tip, wing = (far, far + 8.0) if backwards else (near, near - 8.0)
    corners = [(tip, side), (wing, side - 4), (wing, side + 4)]
    arrow = " ".join(f"{b:.1f},{a:.1f}" if down else f"{a:.1f},{b:.1f}" for a, b in corners)
    return Curve(pieces=tuple(pieces), arrow=arrow, backwards=backwards)


def _sides(box: Box, *, down: bool) -> tuple[float, float, float]:
    """Where a curve comes in and goes out, along the way, and where both are across it. A lane is only passed."""
    near, across = (box.y, box.x + box.width / 2) if down else (box.x, box.y + box.height / 2)
    if box.kind == "lane":
        return box.begin, box.begin, across
    return near, near + (box.height if down else box.width), across


def _straight(start: float, end: float, across: float, *, down: bool) -> list[str]:
    """A line along the way, where it has a length."""
    if end <= start:
        return []
    (x1, y1), (x2, y2) = [(across, along) if down else (along, across) for along in (start, end)]
    return [f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"]


def _node_box(node: GraphNode) -> Box:
    name = fold_labels(node.labels)
    if len(node.labels) > 1 and len(name) > 2 * _NODE_CHARS:
        name = plural(len(node.labels), node.role)
    pids = f"pid {fold(node.pids)}" if node.pids else ""
    if len(node.labels) > 1:
        pids = f"{len(node.labels)} processes"
    lines = [
        *([Line("first blocker", "tag")] if node.root else []),
        *(Line(text, "name") for text in _wrapped(name, _NODE_CHARS) or [node.role or "?"]),
        *([Line(pids, "pid")] if pids else []),
        *(Line(text, "doing") for text in _wrapped(node.doing, _NODE_CHARS)),
    ]
    return _box("node", lines, _NODE_CHAR, node=node)


def _why_box(edge: GraphEdge, index: int) -> Box:
    lines = [Line(text, "why") for text in _wrapped(edge.why, _WHY_CHARS) or ["waits"]]
    return _box("why", lines, _WHY_CHAR, edge=index)


def _box(kind: Kind, lines: Sequence[Line], char: float, *, node: GraphNode | None = None, edge: int = -1) -> Box:
    pad = _PAD if kind == "node" else 3.0
    return Box(
        kind=kind,
        width=max(columns(clean(line.text)) for line in lines) * char + 2 * pad,
        height=len(lines) * LINE + 2 * pad,
        lines=tuple(lines),
        node=node,
        edge=edge,
    )


def _wrapped(text: str, chars: int) -> list[str]:
    """At most five lines; words that are too long for one are broken, what is left is cut off."""
    return textwrap.wrap(text, chars, max_lines=5, placeholder=" …")

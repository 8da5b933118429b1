"""The wait-for graph: who stands in it, and that its drawing can be read."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.diagnosis import test_causes as causes
from tests.unit.diagnosis.scenario import Server
from tests.unit.report.pages import snapshot_of
from vllmdiag.diagnosis.graph import folded
from vllmdiag.diagnosis.report import report_of
from vllmdiag.model.report import GraphEdge, GraphNode, WaitGraph
from vllmdiag.render.html_graph import Box, layout


def _graph(change: Callable[[Server], None]) -> WaitGraph:
    return report_of(snapshot_of(change)).graph


def _named(graph: WaitGraph) -> set[tuple[str, str]]:
    names = ["+".join(node.labels) for node in graph.nodes]
    return {(names[edge.waiter], names[edge.on]) for edge in graph.edges}


def test_the_waits_lead_from_the_client_to_the_root() -> None:
    graph = _graph(causes.worker_stopped)
    assert _named(graph) == {
        ("client", "APIServer"),
        ("APIServer", "EngineCore"),
        ("EngineCore", "Worker_TP0"),
        ("EngineCore", "Worker_TP1"),
        ("Worker_TP0", "Worker_TP1"),
    }
    assert [node.labels for node in graph.nodes if node.root] == [("Worker_TP1",)]


def test_a_rank_that_is_gone_stands_at_the_end_though_it_has_no_pid() -> None:
    graph = _graph(causes.worker_vanished_before)
    (root,) = [node for node in graph.nodes if node.root]
    assert (root.labels, root.pids, root.doing) == (("Worker_TP1",), (), "gone")
    assert ("Worker_TP0", "Worker_TP1") in _named(graph)


def test_who_idles_beside_the_fault_is_no_part_of_the_picture() -> None:
    assert _named(_graph(causes.deaf_client)) == {("APIServer", "client 10.0.0.9:41000")}


def test_of_a_healthy_server_all_waits_are_shown_and_no_root() -> None:
    graph = report_of(snapshot_of()).graph
    assert _named(graph) == {("Worker_TP0+Worker_TP1", "EngineCore")}
    assert not any(node.root for node in graph.nodes)


def test_a_root_that_waits_itself_is_a_cycle_and_is_drawn_as_one() -> None:
    drawing = layout(_graph(causes.diverged))
    assert any(curve.backwards for curve in drawing.curves)


def test_ranks_that_do_the_same_are_one_node_and_the_root_is_never_folded() -> None:
    engine, ranks = ("EngineCore", 1, "EngineCore"), [("Worker", 10 + k, f"Worker_TP{k}") for k in range(384)]
    edges = [(engine, rank, "its reply has not come", 3) for rank in ranks]
    graph = folded(edges, dict.fromkeys(ranks, "all_reduce"), ranks[7])
    assert [len(node.labels) for node in graph.nodes] == [1, 1, 383]
    assert [(edge.why, edge.count) for edge in graph.edges] == [
        ("its reply has not come", 383),
        ("its reply has not come", 1),
    ]


def test_where_everybody_does_something_else_they_are_folded_by_role() -> None:
    engine, ranks = ("EngineCore", 1, "EngineCore"), [("Worker", 10 + k, f"Worker_TP{k}") for k in range(384)]
    edges = [(rank, engine, "why", 3) for rank in ranks]
    graph = folded(edges, {rank: f"step {rank[1]}" for rank in ranks}, None)
    assert [(node.role, node.doing) for node in graph.nodes] == [("Worker", "different things"), ("EngineCore", "")]


@st.composite
def graphs(draw: st.DrawFn) -> WaitGraph:
    n = draw(st.integers(1, 8))
    words = st.sampled_from(["", "x", "waits for the readers of a full ring", "word" * 30, "長い名前" * 9, "a\nb\x1b "])
    nodes = tuple(
        GraphNode(
            id=i,
            role="Worker",
            labels=tuple(draw(st.lists(words, min_size=1, max_size=3))),
            doing=draw(words),
            root=i == n - 1,
        )
        for i in range(n)
    )
    pairs = draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=14, unique=True).map(
            lambda found: [(a, b) for a, b in found if a != b]
        )
    )
    return WaitGraph(nodes=nodes, edges=tuple(GraphEdge(waiter=a, on=b, why=draw(words)) for a, b in pairs))


def _apart(a: Box, b: Box) -> bool:
    return a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y


@given(graphs(), st.booleans())
def test_nothing_lies_on_top_of_anything_else_and_all_is_inside(graph: WaitGraph, down: bool) -> None:
    drawing = layout(graph, down=down)
    boxes = drawing.boxes
    assert [box.node for box in boxes if box.kind == "node"] == list(graph.nodes)
    assert sorted(box.edge for box in boxes if box.kind == "why") == list(range(len(graph.edges)))
    assert all(_apart(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    for box in boxes:
        assert 0 <= box.x <= box.x + box.width <= drawing.width + 1e-6
        assert 0 <= box.y <= box.y + box.height <= drawing.height + 1e-6


@given(graphs(), st.booleans())
def test_an_arrow_goes_forward_unless_it_closes_a_cycle(graph: WaitGraph, down: bool) -> None:
    drawing = layout(graph, down=down)
    at = {box.node.id: (box.y if down else box.x) for box in drawing.boxes if box.node is not None}
    assert len(drawing.curves) == len(graph.edges)
    for edge, curve in zip(graph.edges, drawing.curves, strict=True):
        assert (at[edge.on] < at[edge.waiter]) == curve.backwards
    without = [(e.waiter, e.on) for e, c in zip(graph.edges, drawing.curves, strict=True) if not c.backwards]
    assert _has_no_cycle(without)


@given(graphs(), st.booleans())
def test_a_curve_runs_through_boxes_of_its_own_only(graph: WaitGraph, down: bool) -> None:
    drawing = layout(graph, down=down)
    for number, curve in enumerate(drawing.curves):
        edge = graph.edges[number]
        others = [
            box
            for box in drawing.boxes
            if box.edge != number and (box.node is None or box.node.id not in (edge.waiter, edge.on))
        ]
        for piece in curve.pieces:
            assert not any(_inside(point, box) for point in _points(piece) for box in others)


def _points(piece: str) -> list[tuple[float, float]]:
    """Points on a straight line (M L) or on a cubic curve (M C)."""
    at = [float(number) for number in re.findall(r"-?\d+\.\d", piece)]
    pairs = list(zip(at[::2], at[1::2], strict=True))
    steps = [i / 20 for i in range(21)]
    if len(pairs) == 2:
        (a, b), (c, d) = pairs
        return [(a + (c - a) * t, b + (d - b) * t) for t in steps]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = pairs
    return [
        (
            (1 - t) ** 3 * x0 + 3 * (1 - t) ** 2 * t * x1 + 3 * (1 - t) * t**2 * x2 + t**3 * x3,
            (1 - t) ** 3 * y0 + 3 * (1 - t) ** 2 * t * y1 + 3 * (1 - t) * t**2 * y2 + t**3 * y3,
        )
        for t in steps
    ]


def _inside(point: tuple[float, float], box: Box) -> bool:
    x, y = point
    return box.x + 1 < x < box.x + box.width - 1 and box.y + 1 < y < box.y + box.height - 1


def _has_no_cycle(edges: list[tuple[int, int]]) -> bool:
    left = set(edges)
    while left:
        free = {edge for edge in left if edge[1] not in {waiter for waiter, _ in left}}
        if not free:
            return False
        left -= free
    return True


@pytest.mark.parametrize("down", [False, True])
def test_nobody_waits_and_there_is_nothing_to_draw(down: bool) -> None:
    assert layout(WaitGraph(), down=down).boxes == ()

"""`report`: one page of HTML that needs nothing but a browser: no script, no network, light and dark, on paper too.

Whatever comes from the machine (titles, paths, log lines) may hold anything. It is cleaned of control characters and
escaped by jinja2, once, where a value enters the text; and the policy in the page lets a browser load and run nothing
but the one style sheet, which is known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vllmdiag.catalogue.entries import catalogue
from vllmdiag.model.diagnosis import LAYER_NAMES, Diagnosis, Link
from vllmdiag.model.report import Report, WaitGraph
from vllmdiag.model.stacks import StackNode, StackTree
from vllmdiag.model.view import InstanceView, MemberView

from .html_graph import LINE, layout
from .html_lag import HEIGHT
from .html_parts import ActivityRow, activity_rows, names, ring_parts, unmatched
from .page import clean
from .parts import folded_holes
from .ring import traffic, writer_place
from .verdict import (
    LAYER_MARK,
    SEVERITY_ROLE,
    about,
    about_all,
    cost_words,
    name_of,
    other_findings,
    target_words,
)
from .words import duration, fold_labels, plural, size

_STATUS_MARK = {"ok": "✓", "warning": "!", "critical": "✗", "unknown": "?"}
_HELPERS = frozenset(["ResourceTracker", "Helper"])
_MAP_FROM = 9
"""Processes from which on the map of squares helps."""
_MOST_CHARTS = 24
"""Of a recording alone."""
_WIDEST = 1400.0
"""A drawing that is wider, CSS pixels, is hard to read on any screen: from top to bottom then."""
_OPEN_NODES = 12
"""A tree of stacks with more nodes than this is closed at first."""


class _Branch(NamedTuple):
    """A node of a tree of stacks in words."""

    who: str
    several: str
    """How many processes; empty for one."""
    frames: list[str]
    meaning: str
    children: list[_Branch]


class _Thread(NamedTuple):
    """A tree of stacks in words."""

    title: str
    several: str
    open: bool
    nodes: list[_Branch]


def report_html(report: Report, version: str) -> str:
    """Write the page.

    Args:
        report: what was judged and seen.
        version: of vllmdiag, for the foot of the page.
    """
    style = _tight(_packaged("report.css"))
    values = {
        "version": version,
        "style": Markup(style),  # noqa: S704  our own file
        "policy": _policy(style),
        **_of_diagnosis(report),
        **_of_graph(report.graph),
        **_of_rings(report),
        **_of_view(report.view),
        "stacks": [_thread(tree) for tree in report.stacks],
    }
    named = {
        "layers": "Layers",
        "graph": "Who waits",
        "rings": "Rings",
        "activity": "Processes",
        "stacks": "Stacks",
        "also": "Findings",
        "holes": "Not seen",
        "cost": "Cost",
    }
    ids = {"activity": "processes", "also": "findings", "holes": "missing"}
    there = {**values, "rings": values["rings"] or values["charts"], "also": values["also"] or values["explained"]}
    values["sections"] = [(ids.get(key, key), name) for key, name in named.items() if there[key]]
    return _tight(_environment().get_template("report.html").render(values))


def _tight(text: str) -> str:
    """The text without the empty lines that templates leave; a tight text stays as it is, byte for byte."""
    return re.sub(r"\n\s*\n", "\n", text.lstrip())


def _policy(style: str) -> str:
    """A Content-Security-Policy that allows the style sheet and nothing else."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_packaged),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )
    environment.globals |= {
        "duration": duration,
        "size": size,
        "plural": plural,
        "traffic": traffic,
        "writer_place": writer_place,
        "about_all": about_all,
        "role_of": SEVERITY_ROLE,
        "layer_names": LAYER_NAMES,
        "line_height": LINE,
        "chart_height": HEIGHT,
    }
    environment.filters["id"] = lambda text: re.sub(r"\W", "-", text)
    return environment


def _packaged(name: str) -> str:
    return resources.files(__package__).joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _cleaned(value: Any) -> Any:
    """What stands on the page of a value. Markup is what a template has made, and clean already."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _of_diagnosis(report: Report) -> dict[str, Any]:
    diagnosis = report.diagnosis
    if diagnosis is None:
        headline = f"A recording of {plural(len(report.traces), 'ring')}"
        return {
            "diagnosis": None, "verdict": None, "title": f"{headline} · vllmdiag", "headline": headline, "tone": "none",
            "layers": (), "also": (), "explained": {}, "holes": (), "cost": "", "costs": (), "rooted": False,
        }  # fmt: skip
    verdict = diagnosis.verdict
    headline = about(verdict.subject, verdict.summary)
    also, explained = other_findings(diagnosis)
    entry = catalogue().get(verdict.cause)
    return {
        "diagnosis": diagnosis,
        "verdict": verdict,
        "tone": verdict.status,
        "mark": _STATUS_MARK[verdict.status],
        "title": f"{verdict.status.upper()} {verdict.cause} · {headline}",
        "headline": headline,
        "place": f"layer {verdict.layer} {LAYER_NAMES.get(verdict.layer, '')}".rstrip() if verdict.layer else "",
        "target": target_words(diagnosis.target, diagnosis.window_s),
        "chain": _chain(verdict.chain),
        "meaning": entry.meaning if entry is not None else "",
        "layers": [(layer, *LAYER_MARK[layer.status]) for layer in diagnosis.layers],
        "also": also,
        "explained": explained,
        "holes": [(fold_labels(whats), why, after) for whats, why, after in folded_holes(diagnosis.missing)],
        **_costs(diagnosis),
    }


def _chain(chain: Sequence[Link]) -> list[str]:
    inner = [f"{name_of(link.subject)} · {link.doing}" if link.doing else name_of(link.subject) for link in chain[1:-1]]
    ends = [name_of(link.subject) for link in chain]
    return [*ends[:1], *inner, *ends[-1:]] if len(ends) > 1 else ends


def _costs(diagnosis: Diagnosis) -> dict[str, Any]:
    words = cost_words(diagnosis.cost, sources=False)
    spent = sorted(diagnosis.cost.sources.items(), key=lambda item: -item[1])
    return {"cost": words, "costs": [(source, f"{seconds * 1000:,.0f} ms") for source, seconds in spent]}


def _of_graph(graph: WaitGraph) -> dict[str, Any]:
    lines = [
        f"{_actors(graph, edge.waiter)} waits for {_actors(graph, edge.on)}" + (f": {edge.why}" if edge.why else "")
        for edge in graph.edges
    ]
    wide, narrow = layout(graph), layout(graph, down=True)
    return {
        "graph": graph if graph.edges else None,
        "rooted": any(node.root for node in graph.nodes),
        "wide": wide if wide.width <= _WIDEST else narrow,
        "narrow": narrow,
        "graph_lines": lines,
        "graph_words": ". ".join(lines),
    }


def _actors(graph: WaitGraph, number: int) -> str:
    node = graph.nodes[number]
    return names(node.labels, node.role) + (" (the first blocker)" if node.root else "")


def _of_rings(report: Report) -> dict[str, Any]:
    rings = report.view.rings if report.view is not None else ()
    parts = ring_parts(rings, report.traces)
    charts = unmatched(report.traces, rings)
    return {
        "rings": parts,
        "charts": charts[:_MOST_CHARTS],
        "more_charts": len(charts) - _MOST_CHARTS,
        "rest_of_rings": [part for part in parts if part.well and not part.rows and not part.charts],
    }


def _of_view(view: InstanceView | None) -> dict[str, Any]:
    members = [m for m in view.members if m.role not in _HELPERS or m.abnormal] if view is not None else []
    rows = activity_rows(members)
    return {
        "view": view,
        "activity": rows,
        "n_members": plural(len(members), "process"),
        "map": _map(members, rows) if len(members) >= _MAP_FROM else [],
    }


def _map(members: Sequence[MemberView], rows: Sequence[ActivityRow]) -> list[tuple[str, str, bool]]:
    """(tooltip, letter, whether it stands out) of every process, in the order of the tree."""
    letters = {id(member): row.mark for row in rows for member in row.members}
    return [
        (
            " · ".join(word for word in (m.label, f"pid {m.pid}" if m.pid is not None else "", m.doing) if word),
            letters[id(m)],
            m.abnormal,
        )
        for m in members
    ]


def _thread(tree: StackTree) -> _Thread:
    nodes = [_branch(node) for node in tree.nodes]
    return _Thread(
        title=tree.thread,
        several=plural(len(tree.labels), "process"),
        open=tree.main and sum(map(_size, nodes)) <= _OPEN_NODES,
        nodes=nodes,
    )


def _branch(node: StackNode) -> _Branch:
    return _Branch(
        who=names(node.labels, "process"),
        several=plural(len(node.labels), "process") if len(node.labels) > 1 else "",
        frames=[f"{frame.name} ({frame.file}:{frame.line})" for frame in node.frames],
        meaning=node.meaning,
        children=[_branch(child) for child in node.children],
    )


def _size(branch: _Branch) -> int:
    return 1 + sum(map(_size, branch.children))

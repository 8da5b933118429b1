"""The text of a FleetDiagnosis: the verdict of the worst server first, then servers and nodes, equal ones folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from vllmdiag.model.fleet import FleetDiagnosis, JobDiagnosis, NodeLine
from vllmdiag.model.nodes import fold_nodes

from .page import Page, Span, Style, Text
from .parts import could_not_observe
from .verdict import STATUS_ROLE, verdict_lines
from .words import duration, plural

_SKEWED_S = 1.0
"""A clock that is certainly off by more than this is told."""
_MOST = 12
"""More rows than this are counted, unless asked for (-v)."""

T = TypeVar("T")


def fleet_text(fleet: FleetDiagnosis, style: Style) -> str:
    """Write the diagnosis of a fleet for people."""
    page = Page(style)
    verdict_lines(page, fleet.verdict)
    answered = sum(n.outcome in ("answered", "empty") for n in fleet.nodes)
    facts = [
        f"{answered} of {plural(len(fleet.nodes), 'node')} answered",
        plural(len(fleet.jobs), "server"),
        f"by {fleet.engine}" if fleet.engine else "",
        fleet.observed_at if style.verbose else "",
    ]
    page.line(Span("fleet".ljust(10), "dim"), " · ".join(f for f in facts if f), indent=2, hang=12)
    _jobs(page, fleet.jobs)
    _nodes(page, fleet)
    could_not_observe(page, fleet.missing)
    return page.text()


def _jobs(page: Page, jobs: Sequence[JobDiagnosis]) -> None:
    if not jobs:
        return
    page.section("servers")
    rows: list[Sequence[Text]] = []
    for group in _grouped(jobs, _same_job):
        first = group[0]
        verdict = first.verdict
        name = first.name if len(group) == 1 else _folded_names(group)
        spread = f"{len(first.nodes)} of {first.nodes_expected} nodes" if first.nodes_expected > 1 else ""
        words = f"{verdict.cause}: {verdict.summary}" if verdict.status != "ok" else verdict.cause
        rows.append((Span(verdict.status, STATUS_ROLE[verdict.status]), name, spread, words))
    _table(page, rows)
    for job in jobs:
        if job.first_error is not None:
            error = job.first_error
            where = f"{error.node} {error.file}" + (f":{error.number}" if error.number else "")
            page.line(
                Span("first error  ", "dim"), f"{job.name}: {where} at {error.at}: {error.text}", indent=2, hang=15
            )


def _same_job(job: JobDiagnosis) -> object:
    """Servers that are well in the same way, each on nodes of its own, are one line."""
    alone = len(job.nodes) == 1 and job.verdict.status == "ok"
    return (job.verdict.cause, job.nodes_expected, job.name.partition(":")[2]) if alone else job.name


def _folded_names(group: Sequence[JobDiagnosis]) -> str:
    port = group[0].name.partition(":")[2]
    return fold_nodes(node for job in group for node in job.nodes) + (f":{port}" if port else "")


def _nodes(page: Page, fleet: FleetDiagnosis) -> None:
    odd = [n for n in fleet.nodes if _remarks(n, fleet.tool) or n.status != "ok"]
    if not odd:
        return
    page.section("nodes")
    rows: list[Sequence[Text]] = []
    for group in _grouped(odd, lambda n: (n.status, n.outcome, n.summary, _remarks(n, fleet.tool))):
        first = group[0]
        name = fold_nodes(n.node for n in group)
        said = " · ".join(part for part in (first.summary, _remarks(first, fleet.tool)) if part)
        rows.append((Span(first.status, STATUS_ROLE[first.status]), name, first.outcome, said))
    _table(page, rows)
    well = [n.node for n in fleet.nodes if n not in odd]
    if well:
        page.line(Span("ok", "good"), f"  {fold_nodes(well)}", indent=2, hang=6)


def _remarks(node: NodeLine, tool: str) -> str:
    words = []
    if node.tool and tool and node.tool != tool:
        words.append(f"vllmdiag {node.tool} there, {tool} here")
    skew, within = node.skew_s, node.skew_within_s or 0.0
    if skew is not None and abs(skew) - within > _SKEWED_S:
        ahead = "ahead" if skew > 0 else "behind"
        words.append(f"its clock is {duration(abs(skew))} {ahead} (within {duration(within)})")
    return " · ".join(words)


def _table(page: Page, rows: Sequence[Sequence[Text]]) -> None:
    shown = rows if page.style.verbose or len(rows) <= _MOST else rows[: _MOST - 1]
    page.table(shown, indent=2)
    if len(shown) < len(rows):
        page.line(f"and {len(rows) - len(shown)} more (-v)", indent=2)


def _grouped(items: Iterable[T], by: Callable[[T], object]) -> list[list[T]]:
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return list(groups.values())

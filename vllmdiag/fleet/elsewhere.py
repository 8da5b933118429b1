"""Causes that only several nodes together show: one that is silent while others wait for it, one that began anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllmdiag.catalogue.entries import cause
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Confidence, Finding, NextStep, Subject
from vllmdiag.model.fleet import NodeReport
from vllmdiag.model.nodes import fold_nodes

from .jobs import Job, Part

POINTS_AWAY = ("unknown", "remote-rank-stalled", "handshake-incomplete", "startup-barrier")
"""They say who waits; whom for may be on another node."""
_WAITS = (*POINTS_AWAY, "rank-never-answered", "collective-divergence", "lost-message", "startup-phase-stuck")
"""What a job shows one of whose nodes has lost its ranks and got new ones."""
_APART_S = 60.0
"""Nodes of one job are started within a minute of each other, or wait for the last with connections made afterwards."""


def nodes_that_are_the_root(job: Job, root: Finding | None, mute: Sequence[NodeReport]) -> Iterator[Finding]:
    """What explains a job whose root points away from the nodes that were seen.

    Args:
        job: over several nodes.
        root: the first finding of its nodes; None where they have no fault.
        mute: nodes that gave no answer.
    """
    if root is None:
        return
    anew = _began_anew(job) if root.cause in _WAITS else None
    if anew is not None:
        yield _restarted(job, anew, root)
    elif job.absent and mute and root.cause in POINTS_AWAY:
        yield _silent(job, root, mute)


def _silent(job: Job, root: Finding, mute: Sequence[NodeReport]) -> Finding:
    names = fold_nodes(r.node for r in mute)
    certain = len(mute) == job.absent
    who = names if certain else f"one of {names}"
    confidence: Confidence = "medium" if certain else "low"
    return _finding(
        "node-silent",
        Subject(role="Host", label=names, node=names),
        f"{who} did not answer, and ranks on {fold_nodes(job.nodes)} wait for {job.absent} of {job.expected} nodes",
        [
            *(f"{r.node}: {r.problem}" for r in mute[:5]),
            f"nothing was seen of {job.absent} of {job.expected} nodes of this job",
            root.summary,
        ],
        confidence,
        root,
    )


def _restarted(job: Job, part: Part, root: Finding) -> Finding:
    others = [p for p in job.parts if p is not part]
    oldest = max(p.age_s or 0.0 for p in others)
    return _finding(
        "node-restarted",
        Subject(role="Host", label=part.node, node=part.node),
        f"{part.node} began anew {part.age_s:.0f} s ago, while the others have run for {oldest:.0f} s: its ranks are"
        " not those that they wait for",
        [
            f"{part.node}: the oldest process of this job is {part.age_s:.0f} s old",
            *(f"{p.node}: {p.age_s:.0f} s" for p in others[:4] if p.age_s is not None),
            f"no connection stands between {part.node} and {fold_nodes(p.node for p in others)}",
            root.summary,
        ],
        "high",
        root,
    )


def _began_anew(job: Job) -> Part | None:
    """The one node whose processes are young and have no connection to the others, which have some among each other."""
    parts = [p for p in job.parts if p.age_s is not None and _sockets_known(p)]
    if len(parts) < 2 or len(parts) != len(job.parts):
        return None
    youngest = min(parts, key=lambda p: p.age_s or 0.0)
    others = [p for p in parts if p is not youngest]
    if min(p.age_s or 0.0 for p in others) - (youngest.age_s or 0.0) < _APART_S:
        return None
    apart = not any(youngest.touches(p) for p in others)
    joined = len(others) < 2 or any(p.touches(q) for p in others for q in others if p is not q)
    return youngest if apart and joined else None


def _sockets_known(part: Part) -> bool:
    return all(not isinstance(p.socket_inodes, Missing) for p in part.scene.processes.values())


def _finding(
    slug: str, subject: Subject, summary: str, evidence: Sequence[str], confidence: Confidence, root: Finding
) -> Finding:
    entry = cause(slug)
    steps = tuple(
        NextStep(command=s.command.replace("{node}", subject.node or "NODE"), why=s.why, risk=s.risk)
        for s in entry.next
    )
    return Finding(
        cause=slug,
        layer=entry.layer,
        severity="critical",
        confidence=confidence,
        subject=subject,
        summary=summary,
        evidence=tuple(evidence),
        chain=root.chain,
        next=steps,
    )

"""One verdict over all nodes: each engine judged with all its ranks, the root among them, the worst job in front.

A node that did not answer is evidence: where the ranks that were seen wait for ranks that were not, it is the first
blocker; where nobody waits for it, what it does is unknown, and the fleet is not called healthy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from vllmdiag.diagnosis.judge import diagnose, rank
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis, Finding, Link, NextStep, Status, Subject, Verdict
from vllmdiag.model.fleet import FirstError, FleetDiagnosis, JobDiagnosis, NodeLine, NodeReport
from vllmdiag.model.nodes import fold_nodes

from .elsewhere import POINTS_AWAY, nodes_that_are_the_root
from .jobs import Job, Part, jobs_of
from .relabel import Moved, merge

_WORST: dict[Status, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}
_OF_ONE_NODE = ("gpu-xid", "fabric-manager")
"""Judged node by node where several are merged: devices are numbered from 0 on each."""
_FRONT = ("Client", "Launcher")
"""What a node without API servers has in front of its engines."""
_EXPLAINS = ("worker-busy", "slow-compile")
"""Mere warnings that hold up ranks on other nodes all the same."""


def judge(reports: Sequence[NodeReport], engine: str = "", tool: str = "") -> FleetDiagnosis:
    """Judge what the nodes answered. Pure.

    Args:
        reports: one for each node that was asked.
        engine: by which engine.
        tool: version of vllmdiag that judges.
    """
    mute = [r for r in reports if r.outcome in ("silent", "refused", "garbage")]
    jobs = [_Judged(job, mute) for job in jobs_of(reports)]
    told = sorted((j.told for j in jobs), key=_worst_first)
    return FleetDiagnosis(
        tool=tool,
        observed_at=max((s.observed_at for r in reports for s in r.snapshots), default=""),
        engine=engine,
        verdict=_verdict(told, mute, reports),
        jobs=tuple(told),
        nodes=tuple(_line(report, jobs) for report in reports),
        missing=tuple(hole for job in jobs for hole in job.missing),
    )


def _worst_first(job: JobDiagnosis) -> tuple[object, ...]:
    root = next((f for f in job.findings if f.folded_into is None and f.severity != "info"), None)
    return _WORST[job.verdict.status], _key(root) if root is not None else (), job.name


def _key(finding: Finding) -> tuple[object, ...]:
    """The root of a job over several nodes: what points to another node comes after what stands for itself."""
    if finding.severity == "info":
        return (3, *rank(finding))
    explains = finding.severity == "critical" or finding.cause in _EXPLAINS
    away = finding.cause in POINTS_AWAY
    return (0 if explains and not away else 1 if away else 2, *rank(finding))


class _Judged:
    """One job under judgement."""

    def __init__(self, job: Job, mute: Sequence[NodeReport]) -> None:
        self.job = job
        self.diagnoses = [(unit, _of_unit(unit)) for unit in job.units]
        own = [f for _, diagnosis in self.diagnoses for f in diagnosis.findings]
        several = len(job.nodes) > 1 or job.absent > 0
        ordered = sorted(own, key=_key if several else rank)
        if several:
            root = ordered[0] if ordered and ordered[0].severity != "info" else None
            ordered = [*nodes_that_are_the_root(job, root, mute), *ordered]
            ordered = _folded(ordered)
        self.findings = tuple(_placed(self._with_front(f)) for f in ordered)
        self.told = JobDiagnosis(
            name=_name(job),
            nodes=job.nodes,
            nodes_expected=job.expected,
            members=sum(len(p.scene.instance.members) for p in job.parts),
            verdict=self._verdict(),
            findings=self.findings,
            first_error=_first_error(job),
        )

    @property
    def root(self) -> Finding | None:
        return next((f for f in self.findings if f.severity != "info" and f.folded_into is None), None)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """Holes, each with the nodes that have it."""
        holes: dict[Missing, list[str]] = {}
        for unit, diagnosis in self.diagnoses:
            for hole in diagnosis.missing:
                holes.setdefault(hole, []).extend(p.node for p in unit)
        found = [
            msgspec.structs.replace(hole, what=f"{fold_nodes(dict.fromkeys(nodes))}: {hole.what}")
            for hole, nodes in holes.items()
        ]
        if self.job.absent:
            found.append(
                Missing(
                    what=f"{self.job.absent} of {self.job.expected} nodes of {self.told.name}",
                    why="its arguments speak of them and nothing of them was seen",
                    next="ask them too",
                )
            )
        return tuple(found)

    def status_of(self, node: str) -> tuple[Status, str]:
        """How one node of the job stands, in words."""
        root, verdict = self.root, self.told.verdict
        if root is None or root.subject.node == node or len(self.job.nodes) == 1:
            return verdict.status, f"{verdict.cause}: {verdict.summary}" if root is not None else verdict.cause
        own = [f for f in self.findings if f.severity != "info" and f.subject.node == node]
        where = f" on {root.subject.node}" if root.subject.node else ""
        return "warning" if own else "ok", f"{own[0].cause}, explained by {root.cause}{where}" if own else "waits"

    def _verdict(self) -> Verdict:
        root = self.root
        if root is None:
            verdicts = [diagnosis.verdict for _, diagnosis in self.diagnoses]
            worst = min(verdicts, key=lambda v: _WORST[v.status])
            return _serving(verdicts) or worst
        return Verdict(
            status="critical" if root.severity == "critical" else "warning",
            cause=root.cause,
            layer=root.layer,
            subject=root.subject,
            since_s=root.since_s,
            confidence=root.confidence,
            summary=root.summary,
            chain=root.chain,
            next=root.next,
            evidence=root.evidence,
        )

    def _with_front(self, finding: Finding) -> Finding:
        """A chain that begins at an engine of another node gets the head's API server in front of it."""
        head = self.job.head
        server = next((m for m in head.scene.servers if head.scene.alive(m)), None)
        chain = list(itertools.dropwhile(lambda link: link.subject.role in _FRONT, finding.chain))
        away = bool(chain) and chain[0].subject.role == "EngineCore" and chain[0].subject.node != head.node
        if server is None or not away:
            return finding
        subject = msgspec.structs.replace(head.scene.subject(server.pid), node=head.node)
        front = (
            Link(subject=Subject(role="Client", label="client"), doing="waits for its answer"),
            Link(subject=subject, doing="waits for the engine"),
        )
        return msgspec.structs.replace(finding, chain=(*front, *chain))


def _placed(finding: Finding) -> Finding:
    """What to do next, with the node to do it on."""
    subject = finding.subject
    if subject.node is None or subject.role == "Host":
        return finding
    steps = tuple(msgspec.structs.replace(s, why=f"on {subject.node}: {s.why}") for s in finding.next)
    return msgspec.structs.replace(finding, next=steps)


def _serving(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Healthy engines of one job: one that works speaks for those that have nothing to do."""
    if any(v.status != "ok" for v in verdicts):
        return None
    order = ("starting", "serving", "busy", "idle")
    return min(verdicts, key=lambda v: order.index(v.cause) if v.cause in order else len(order))


def _of_unit(unit: Sequence[Part]) -> Diagnosis:
    if len(unit) == 1:
        return _alone(unit[0])
    moved = merge([(part.node, part.snapshot) for part in unit])
    diagnosis = moved.back(diagnose(moved.snapshot))
    devices = [p for p in unit if p.snapshot.accelerators or p.snapshot.drivers]
    local = [f for p in devices for f in _alone(p).findings if f.cause in _OF_ONE_NODE]
    known = {(f.cause, f.subject.node) for f in diagnosis.findings}
    added = tuple(f for f in local if (f.cause, f.subject.node) not in known)
    return msgspec.structs.replace(diagnosis, findings=(*diagnosis.findings, *added))


def _alone(part: Part) -> Diagnosis:
    """The diagnosis of one node, its subjects named by it."""
    here = {p.pid: (part.node, p.pid) for p in part.snapshot.processes}
    diagnosis = Moved(part.snapshot, here).back(diagnose(part.snapshot))

    def placed(subject: Subject) -> Subject:
        return subject if subject.node else msgspec.structs.replace(subject, node=part.node)

    findings = tuple(msgspec.structs.replace(f, subject=placed(f.subject)) for f in diagnosis.findings)
    verdict = msgspec.structs.replace(diagnosis.verdict, subject=placed(diagnosis.verdict.subject))
    return msgspec.structs.replace(diagnosis, findings=findings, verdict=verdict)


def _folded(ordered: Sequence[Finding]) -> list[Finding]:
    """Everything under the first of all nodes, but for clients and leftovers, which stand for themselves."""
    if not ordered or ordered[0].severity == "info":
        return list(ordered)
    root = ordered[0]

    def fold(finding: Finding) -> Finding:
        apart = finding.severity == "info" or finding.cause == "shm-full-of-leaks"
        apart = apart or (finding.layer == 5 and root.layer != 5)
        return msgspec.structs.replace(finding, folded_into=None if apart else root.cause)

    return [msgspec.structs.replace(root, folded_into=None), *(fold(f) for f in ordered[1:])]


def _name(job: Job) -> str:
    options = job.head.options
    nodes = fold_nodes(job.nodes)
    return f"{nodes}:{options.port}" if options is not None and job.head.scene.http_ports else nodes


def _first_error(job: Job) -> FirstError | None:
    """The earliest over all logs of the job, by clocks set right as far as their skew is known."""
    found = [
        (digest.first_error.at - (part.skew_s or 0.0), part.node, digest.first_error)
        for part in job.parts
        for digest in part.snapshot.logs
        if digest.first_error is not None and digest.first_error.at is not None
    ]
    if not found:
        return None
    _, node, event = min(found, key=lambda f: (f[0], f[1]))
    return FirstError(node=node, file=event.file, number=event.number, text=event.text, at=event.time)


def _verdict(told: Sequence[JobDiagnosis], mute: Sequence[NodeReport], reports: Sequence[NodeReport]) -> Verdict:
    if told and told[0].verdict.status in ("critical", "warning"):
        return told[0].verdict
    if mute:
        return _unseen(told, mute)
    if not told:
        where = f"on {fold_nodes(r.node for r in reports)}" if reports else "because no node was asked"
        return _say("unknown", f"no vLLM was found {where}", "unknown")
    if told[0].verdict.status == "unknown":
        return told[0].verdict
    causes = dict.fromkeys(job.verdict.cause for job in told)
    words = ", ".join(f"{sum(j.verdict.cause == cause for j in told)} {cause}" for cause in causes)
    nodes = len({node for job in told for node in job.nodes})
    cause = told[0].verdict.cause if len(causes) == 1 else "serving" if "serving" in causes else next(iter(causes))
    return _say(cause, f"{_count(len(told), 'server')} on {_count(nodes, 'node')}: {words}", "ok")


def _unseen(told: Sequence[JobDiagnosis], mute: Sequence[NodeReport]) -> Verdict:
    """Nothing is wrong with what was seen, and not everything was seen."""
    names = fold_nodes(r.node for r in mute)
    again = f"vllmdiag fleet diagnose --engine ssh --nodes {names} --deadline 120"
    steps = (NextStep(command=again, why="ask them alone, with more time", risk="none"),)
    evidence = tuple(f"{fold_nodes(nodes)}: {problem}" for problem, nodes in _grouped(mute, lambda r: r.problem))
    ok = f"{_count(len(told), 'server')} on other nodes without a fault" if told else "nothing else was seen"
    summary = f"{_count(len(mute), 'node')} gave no answer ({names}); {ok}"
    said = _say("unknown", summary, "unknown")
    return msgspec.structs.replace(said, evidence=evidence, next=steps, confidence="low")


def _say(cause: str, summary: str, status: Status) -> Verdict:
    subject = Subject(role="Fleet", label="fleet")
    return Verdict(
        status=status, cause=cause, layer=0, subject=subject, since_s=None, confidence="high", summary=summary
    )


def _grouped(reports: Iterable[NodeReport], by: Callable[[NodeReport], str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for report in reports:
        groups.setdefault(by(report), []).append(report.node)
    return list(groups.items())


def _line(report: NodeReport, jobs: Sequence[_Judged]) -> NodeLine:
    mine = [job.status_of(report.node) for job in jobs if report.node in job.job.nodes]
    status: Status
    if report.outcome == "empty":
        status, summary = "ok", "no vLLM there"
    elif report.outcome != "answered" or not mine:
        status, summary = "unknown", report.problem or "no vLLM in what it answered"
    else:
        status, summary = min(mine, key=lambda s: _WORST[s[0]])
        summary += f" ({report.problem})" if report.problem else ""
    return NodeLine(
        node=report.node,
        outcome=report.outcome,
        status=status,
        summary=summary,
        instances=len(report.snapshots),
        tool=report.tool,
        took_s=report.took_s,
        skew_s=report.skew_s,
        skew_within_s=report.skew_within_s,
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"

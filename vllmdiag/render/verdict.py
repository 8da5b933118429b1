"""The text of a Diagnosis: the verdict first, then its evidence and the next step, the layers, and what stayed dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllmdiag.model.diagnosis import (
    LAYER_NAMES,
    Cost,
    Diagnosis,
    Finding,
    LayerResult,
    Link,
    NextStep,
    Status,
    Subject,
    Target,
    Verdict,
)
from vllmdiag.model.ranks import fold

from .page import Page, Role, Span, Style
from .parts import could_not_observe
from .words import duration, fold_labels, plural

STATUS_ROLE: dict[Status, Role] = {"ok": "good", "warning": "warn", "critical": "bad", "unknown": "warn"}
LAYER_MARK: dict[str, tuple[str, Role]] = {
    "ok": ("✓", "good"),
    "fault": ("✗", "bad"),
    "suspect": ("!", "warn"),
    "unknown": ("?", "warn"),
}
"""Mark and role of the status of a layer."""
SEVERITY_ROLE: dict[str, Role] = {"info": "plain", "warning": "warn", "critical": "bad"}
_KEY = 10
"""Columns of the key in front of evidence and next steps."""


def diagnosis_text(diagnosis: Diagnosis, style: Style) -> str:
    """Write a diagnosis for people."""
    page = Page(style)
    verdict_lines(page, diagnosis.verdict)
    if diagnosis.verdict.status != "ok":
        playbook = f"vllmdiag playbook show {diagnosis.verdict.cause}"
        page.line(Span("more".ljust(_KEY), "dim"), playbook, indent=2, hang=2 + _KEY)
    page.line(
        Span("target".ljust(_KEY), "dim"), target_words(diagnosis.target, diagnosis.window_s), indent=2, hang=2 + _KEY
    )
    if style.verbose:
        facts = " · ".join(fact for fact in (diagnosis.observed_at, f"vllmdiag {diagnosis.tool}") if fact)
        page.line(Span("observed".ljust(_KEY), "dim"), facts, indent=2, hang=2 + _KEY)
    _layers(page, diagnosis.layers)
    _findings(page, diagnosis)
    could_not_observe(page, diagnosis.missing)
    if style.verbose:
        page.gap()
        page.line(Span("cost".ljust(_KEY), "dim"), cost_words(diagnosis.cost), indent=2, hang=2 + _KEY)
    return page.text()


def verdict_lines(page: Page, verdict: Verdict) -> None:
    """Write a verdict: what, where, since when, how sure; the chain, the evidence, the next step."""
    place = f"layer {verdict.layer} {LAYER_NAMES.get(verdict.layer, '')}".rstrip() if verdict.layer else verdict.cause
    place = "" if place == verdict.status else place
    said = about(verdict.subject, verdict.summary)
    node = verdict.subject.node or ""
    facts = [
        place,
        said,
        f"on {node}" if node not in said else "",
        f"for at least {duration(verdict.since_s)}" if verdict.since_s is not None else "",
        f"{verdict.confidence} confidence",
    ]
    page.line(
        Span(verdict.status.upper(), STATUS_ROLE[verdict.status]),
        "  ",
        Span(" · ".join(fact for fact in facts if fact), "head"),
    )
    if verdict.chain:
        page.line(_chain(verdict.chain), indent=2, hang=4)
    _evidence(page, verdict.evidence, indent=2)
    _next(page, verdict.next, indent=2)


def about(subject: Subject, summary: str) -> str:
    """The summary, with the name in front where it does not hold it."""
    if not subject.label or subject.label in summary:
        return summary
    return f"{name_of(subject)}: {summary}"


def name_of(subject: Subject) -> str:
    """Label, pid and node of a subject, as far as they are known."""
    label = subject.label or subject.role
    pid = f" (pid {subject.pid})" if subject.pid is not None else ""
    node = f" on {subject.node}" if subject.node else ""
    return label + pid + node


def _chain(chain: Iterable[Link]) -> str:
    """``client -> APIServer 2839 -> Worker_TP0 2862 (all_reduce)``: spelled in ASCII always, people grep for it.

    What the ends do is left out: the client waits, and the summary above is about the last.
    """
    links = list(chain)
    nodes = {link.subject.node for link in links if link.subject.node}
    words = []
    for number, link in enumerate(links, start=1):
        label = link.subject.label or link.subject.role
        pid = f" {link.subject.pid}" if link.subject.pid is not None else ""
        within = 1 < number < len(links) and link.doing not in ("", "idle")
        node = f"@{link.subject.node}" if len(nodes) > 1 and link.subject.node else ""
        words.append(label + pid + node + (f" ({link.doing})" if within else ""))
    return " -> ".join(words)


def _evidence(page: Page, evidence: Sequence[str], indent: int) -> None:
    for i, fact in enumerate(evidence):
        key = "" if i else "evidence"
        page.line(Span(key.ljust(_KEY), "dim"), fact, indent=indent, hang=indent + _KEY)


def _next(page: Page, steps: Sequence[NextStep], indent: int) -> None:
    commands = max((len(step.command) for step in steps), default=0)
    for i, step in enumerate(steps):
        risk = "" if step.risk in {"", "none"} else f"; risk: {step.risk}"
        why = f"   (why: {step.why}{risk})" if step.why else f"   (risk: {step.risk})" if risk else ""
        command = step.command.ljust(commands) if why else step.command
        key = "" if i else "next"
        page.line(
            Span(key.ljust(_KEY), "dim"), Span(command, "head", whole=True), why, indent=indent, hang=indent + _KEY
        )


def target_words(target: Target, window_s: float) -> str:
    """Version, port and pids of the instance, and how long it was watched."""
    groups = (
        ("APIServer", target.api_server_pids),
        ("DPCoordinator", target.coordinator_pids),
        ("EngineCore", target.engine_pids),
        ("Worker", target.worker_pids),
    )
    facts = [f"vLLM {target.vllm_version}" if target.vllm_version else "vLLM of unknown version"]
    facts += [f"port {target.port}"] if target.port else []
    facts += [f"{name} {fold(pids)}" for name, pids in groups if pids]
    facts += [f"watched for {duration(window_s)}"] if window_s else []
    return " · ".join(facts)


def _layers(page: Page, layers: Sequence[LayerResult]) -> None:
    if not layers:
        return
    page.gap()
    rows = []
    for layer in layers:
        mark, role = LAYER_MARK[layer.status]
        rows.append((f"layer {layer.layer} {layer.name}", Span(f"{mark} {layer.status}", role), layer.summary))
    page.table(rows, indent=2)


def other_findings(diagnosis: Diagnosis) -> tuple[list[list[Finding]], dict[str, list[list[Finding]]]]:
    """What was found beside the verdict, equal ones together: roots, and by cause what it explains."""
    verdict = diagnosis.verdict
    others = [
        finding
        for finding in diagnosis.findings
        if finding.folded_into or (finding.cause, finding.subject) != (verdict.cause, verdict.subject)
    ]
    causes = dict.fromkeys(finding.folded_into for finding in others if finding.folded_into)
    explained = {cause: _groups(f for f in others if f.folded_into == cause) for cause in causes}
    return _groups(finding for finding in others if not finding.folded_into), explained


def _findings(page: Page, diagnosis: Diagnosis) -> None:
    """The other findings: roots first with their evidence, then what they explain."""
    roots, explained = other_findings(diagnosis)
    if roots:
        page.section("also found")
    for group in roots:
        first = group[0]
        place = f"layer {first.layer} {LAYER_NAMES.get(first.layer, '')} · " if first.layer else ""
        page.line(
            Span(first.severity.ljust(_KEY), SEVERITY_ROLE[first.severity]),
            f"{place}{about_all(group)} · {first.confidence} confidence",
            indent=2,
            hang=2 + _KEY,
        )
        _evidence(page, first.evidence, indent=2 + _KEY)
        _next(page, first.next, indent=2 + _KEY)
    for cause, groups in explained.items():
        page.section(f"explained by {cause}")
        page.table([(group[0].cause, about_all(group)) for group in groups], indent=2)


def _groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one cause and severity together, in the order of their first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.cause, finding.severity), []).append(finding)
    return list(groups.values())


def about_all(group: Sequence[Finding]) -> str:
    """The summary of the first of a group, with the names of the others."""
    text = about(group[0].subject, group[0].summary)
    others = [finding.subject.label or finding.subject.role for finding in group[1:]]
    return f"{text} · also {fold_labels(others)}" if others else text


def cost_words(cost: Cost, *, sources: bool = True) -> str:
    """What the look cost, with or without what each source took."""
    by_source = sorted(cost.sources.items()) if sources else []
    facts = [
        f"{cost.wall_s:.2f} s",
        plural(cost.ptrace_calls, "ptrace call"),
        f"{plural(cost.processes_dumped, 'process')} dumped",
        *(f"{source} {seconds * 1000:.0f} ms" for source, seconds in by_source),
    ]
    return " · ".join(facts)

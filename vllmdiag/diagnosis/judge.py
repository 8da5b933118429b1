"""From a snapshot to a diagnosis: findings of every layer, the root among them, the five layers, what stays unknown."""

from __future__ import annotations

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import (
    LAYER_NAMES,
    Confidence,
    Cost,
    Diagnosis,
    Finding,
    LayerResult,
    LayerStatus,
    Status,
    Subject,
    Target,
    Verdict,
)
from vllmdiag.model.snapshot import Snapshot

from .activity import IDLE
from .case import Case
from .client_rules import client_findings
from .glimpse import glimpse, hole, not_proven_busy, not_proven_idle
from .gpu_facts import gpu_without_fault
from .gpu_rules import gpu_findings
from .host_rules import host_findings, memory_findings
from .log_rules import log_findings
from .logs import log_evidence
from .loose import loose_findings
from .output_rules import output_findings
from .process_rules import process_findings
from .queue_rules import queue_findings
from .ray_rules import ray_findings
from .reach_rules import not_probed, probed_words, reach_findings
from .scene import Scene, scene_of
from .shm_rules import shm_findings
from .startup import line_of, phase_of, standings, start_method_words
from .startup_rules import startup_findings
from .thread_rules import ring_findings
from .traffic_rules import traffic_findings
from .wrong_way import wrong_way_of

_SEVERITY = {"critical": 0, "warning": 1, "info": 2}
_CONFIDENCE = {"high": 0, "medium": 1, "low": 2}
_HARD_ORDER = (
    "sleep-wake-race",
    "gpu-xid",
    "driver-unkillable",
    "shm-exhausted",
    "shm-too-small",
    "ipc-path-too-long",
    "port-conflict",
    "cuda-fork-poisoned",
    "fabric-manager",
    "memlock-limit",
    "oom-killed",
    "engine-dead",
    "orphan-engine",
    "worker-dead",
    "process-stopped",
    "process-uninterruptible",
    "host-overloaded",
    "scheduler-livelock",
    "dp-wave-split",
)
"""Causes that are facts by themselves, the most fundamental first: they explain what the waits show."""


def diagnose(snapshot: Snapshot) -> Diagnosis:
    """Judge a snapshot. Pure: the same snapshot gives the same diagnosis, live or from a file.

    Args:
        snapshot: one window over one instance.

    Returns:
        The diagnosis; `verdict.status` is ``unknown`` where too little could be seen to call it healthy.
    """
    scene = scene_of(snapshot)
    if scene is None:
        return _nobody(snapshot)
    case = Case(scene)
    deaths = list(process_findings(case))
    findings = [
        *memory_findings(case, deaths),
        *deaths,
        *host_findings(case),
        *ray_findings(snapshot, scene),
        *reach_findings(case),
        *startup_findings(case),
        *wrong_way_of(case),
        *queue_findings(case),
        *ring_findings(case),
        *gpu_findings(case),
        *shm_findings(case),
        *client_findings(case),
        *output_findings(case),
        *traffic_findings(snapshot, well=_works(case), target=scene.instance.roots[0]),
    ]
    told = {f.cause for f in findings if f.severity != "info"}
    if "orphan-engine" in told:
        told.add("engine-dead")  # that engine lives: the one whose end a log tells of was of another start
    findings += [f for f in log_findings(case) if f.cause not in told]
    findings = _fold(findings)
    missing = (*missing_of(snapshot), *not_probed(snapshot))
    verdict = _verdict(case, findings)
    return Diagnosis(
        tool=snapshot.tool,
        observed_at=snapshot.observed_at,
        window_s=snapshot.window_s,
        target=_target(scene),
        verdict=verdict,
        layers=_layers(case, findings),
        findings=tuple(findings),
        missing=missing,
        cost=Cost(
            wall_s=snapshot.window_s,
            processes_dumped=sum(bool(p.stacks) for p in snapshot.processes),
            sources={c.source: c.wall_s for c in snapshot.costs},
        ),
    )


def _fold(findings: list[Finding]) -> list[Finding]:
    """Sort, and mark every finding that the root explains. A client that does not read stands for itself."""
    ordered = sorted(findings, key=rank)
    if not ordered or ordered[0].severity == "info":
        return ordered
    root = ordered[0]
    return [root] + [
        f if f.severity == "info" or _stands_alone(f, root) else msgspec.structs.replace(f, folded_into=root.cause)
        for f in ordered[1:]
    ]


def _stands_alone(finding: Finding, root: Finding) -> bool:
    """Nothing else brings it about. A table of descriptors that is full may well be an echo of a stall."""
    of_a_client = finding.layer == 5 and root.layer != 5 and finding.cause != "fd-exhausted"
    return of_a_client or finding.cause == "shm-full-of-leaks"


def rank(finding: Finding) -> tuple[object, ...]:
    """Sort key: the root before what it explains."""
    hard = _HARD_ORDER.index(finding.cause) if finding.cause in _HARD_ORDER else len(_HARD_ORDER)
    undecided = finding.cause in ("unknown", "echo-only")
    return (
        _SEVERITY[finding.severity],
        hard,
        undecided,
        _CONFIDENCE[finding.confidence],
        finding.layer,
        finding.cause,
        finding.subject.label,
        finding.subject.pid or 0,
    )


def _works(case: Case) -> bool:
    """An engine was seen in its loop, and none stands although work is outstanding."""
    engines = [e for e in case.scene.engines if case.in_loop(e) and not case.halted(e.pid)]
    return bool(engines) and not any(case.progress[e.pid].frozen for e in engines)


def _verdict(case: Case, findings: list[Finding]) -> Verdict:
    found = _of_root(case.scene.snapshot, findings) or _healthy(case, findings)
    # One look may be of a server at work: that is no fault, and no health either.
    return msgspec.structs.replace(found, status="unknown") if found.cause == "unknown" and glimpse(case) else found


def _of_root(snapshot: Snapshot, findings: list[Finding]) -> Verdict | None:
    """The root among the findings as the verdict; None where no finding is a fault."""
    root = next((f for f in findings if f.severity != "info" and f.folded_into is None), None)
    if root is None:
        return None
    # Evidence that is too little to tell a fault from none is no alarm.
    undecided = root.cause == "echo-only" or (root.cause == "unknown" and root.severity == "warning")
    logged = [line for line in log_evidence(snapshot) if not any(e in line for e in root.evidence)]
    return Verdict(
        status="unknown" if undecided else "critical" if root.severity == "critical" else "warning",
        cause=root.cause,
        layer=root.layer,
        subject=root.subject,
        since_s=root.since_s,
        confidence=root.confidence,
        summary=root.summary,
        chain=root.chain,
        next=root.next,
        evidence=(*root.evidence, *logged),
    )


def _healthy(case: Case, findings: list[Finding]) -> Verdict:
    scene = case.scene
    whole = Subject(role="Instance", pid=scene.instance.roots[0], label=scene.members[scene.instance.roots[0]].label)

    def say(
        cause: str, summary: str, evidence: list[str], confidence: Confidence = "high", status: Status = "ok"
    ) -> Verdict:
        return Verdict(
            status=status,
            cause=cause,
            layer=0,
            subject=whole,
            since_s=None,
            confidence=confidence,
            summary=summary,
            evidence=tuple(evidence),
        )

    if case.starting:
        motion = case.starting_motion
        places = standings(case)
        doing = [line_of(case, s) for s in places if case.acts[s.pid].seen]
        age = max((p.age_s or 0.0) for p in scene.processes.values())
        blind = not motion and not doing
        if blind:
            return say("unknown", "a server that is not ready yet; nothing of it could be seen", [], "low", "unknown")
        return say(
            "starting",
            f"starting since {age:.0f} s: {phase_of(places) or ', '.join(motion) or 'waiting'}",
            [*doing, *start_method_words(case)],
            "high" if motion else "medium",
        )
    busy = next((f for f in findings if f.cause == "busy"), None)
    moved = {e.label: case.progress[e.pid].moved for e in scene.engines}
    working = {name: words for name, words in moved.items() if words}
    blind_engines = [e for e in scene.engines if not case.acts[e.pid].seen and not moved[e.label]]
    if blind_engines or not (scene.engines or scene.workers):
        names = ", ".join(e.label for e in blind_engines) or "the engine"
        return say("unknown", f"no fault was found, but what {names} does could not be seen", [], "low", "unknown")
    if working:
        words = [f"{name}: {', '.join(w[:3])}" for name, w in working.items()]
        return say("serving", f"{', '.join(working)} {'work' if len(working) > 1 else 'works'}", words)
    if busy is not None:
        return say("busy", busy.summary, list(busy.evidence), busy.confidence)
    outstanding = [w for e in scene.engines for w in case.progress[e.pid].outstanding]
    everyone = [*scene.engines, *scene.workers]
    idle = [m for m in everyone if case.acts[m.pid].kind == IDLE]
    silent = [p for p in scene.probes if p.path == "/health" and p.status is None and p.error != "tls"]
    if silent and scene.servers and not working:
        summary = f"the engine is idle, but /health gave no answer ({silent[0].error}): why could not be seen"
        return say(
            "unknown", summary, [m.label + ": " + case.acts[m.pid].doing for m in scene.servers], "low", "unknown"
        )
    unproven = not_proven_idle(case)
    if len(idle) == len(everyone) and unproven:
        summary = f"every process waits for work, but {unproven}"
        return say("unknown", summary, outstanding, "low", "unknown")
    if len(idle) == len(everyone) and not outstanding:
        words = [f"{m.label}: {case.acts[m.pid].doing}" for m in scene.engines]
        return say(
            "idle",
            "every process waits for work, nothing is unread",
            [*words, "no unread slot, no unread bytes, no request running or waiting"],
        )
    unseen = [m.label for m in everyone if not case.acts[m.pid].seen]
    if unseen:
        return say(
            "unknown",
            f"no fault was found, but what {', '.join(unseen)} do could not be seen",
            outstanding,
            "low",
            "unknown",
        )
    others = [f"{m.label}: {case.acts[m.pid].doing}" for m in everyone if m not in idle]
    if lack := not_proven_busy(case):
        return say("unknown", f"no fault was found; {lack}", others, "low", "unknown")
    return say("busy", "something computes; nothing waits long", others, "medium")


def _layers(case: Case, findings: list[Finding]) -> tuple[LayerResult, ...]:
    snapshot = case.scene.snapshot
    results = []
    for layer in range(1, 6):
        here = [f for f in findings if f.layer == layer and f.severity != "info"]
        roots = [f for f in here if f.folded_into is None]
        status: LayerStatus
        if roots:
            status, summary = "fault", roots[0].summary
        elif here:
            status, summary = "suspect", f"{here[0].summary} (explained by {here[0].folded_into})"
        else:
            status, summary = _unfaulted(case, snapshot, layer)
        results.append(LayerResult(layer=layer, name=LAYER_NAMES[layer], status=status, summary=summary))
    return tuple(results)


def _unfaulted(case: Case, snapshot: Snapshot, layer: int) -> tuple[LayerStatus, str]:
    lack = hole(case, layer)
    return ("unknown", lack) if lack else _sound(case, snapshot, layer)


def _sound(case: Case, snapshot: Snapshot, layer: int) -> tuple[LayerStatus, str]:
    scene = case.scene
    members = [m for m in scene.instance.members if m.role not in ("Helper", "ResourceTracker")]
    if layer == 1:
        return "ok", f"{_count(len(members), 'process', 'processes')}, none stopped or dead"
    if layer == 2:
        if case.starting:
            return "ok", "start-up advances" if case.starting_motion else "start-up waits"
        blind = [m.label for m in (*scene.engines, *scene.servers) if not scene.sockets_known(m.pid)]
        if blind:
            return "unknown", f"descriptors of {', '.join(blind)} not readable: run as the same user or root"
        return "ok", f"{_count(len(scene.listeners), 'endpoint')} bound{probed_words(snapshot)}"
    if layer == 3:
        if case.rings:
            looks = sum(r.segment.polls for r in case.rings)
            return "ok", f"{_count(len(case.rings), 'ring')}, {_count(looks, 'look')}, nothing stuck"
        if scene.workers and not case.starting:
            return "unknown", "no ring could be read: run as the same user or root"
        return "ok", "no ring: the engine runs the model itself" if not case.starting else "no ring yet"
    if layer == 4:
        unseen = [w.label for w in scene.workers if not case.acts[w.pid].seen]
        if unseen:
            return "unknown", f"stacks of {', '.join(unseen)} not readable"
        return gpu_without_fault(case)
    probes = [p for p in scene.probes if p.path == "/health"]
    if not probes:
        return (
            ("ok", "no HTTP yet") if case.starting else ("unknown" if scene.servers else "ok", "no HTTP server to ask")
        )
    answered = next((p for p in probes if p.status is not None), None)
    if answered is None:
        return "unknown", f"/health: {probes[0].error}"
    return "ok", f"/health {answered.status} in {(answered.total_s or 0) * 1000:.0f} ms, no client holds back"


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def missing_of(snapshot: Snapshot) -> tuple[Missing, ...]:
    """What could not be observed of the instance, each hole once."""
    mine = set(snapshot.target_pids)
    holes = [*snapshot.missing, *(h for p in snapshot.processes if p.pid in mine for h in p.missing)]
    holes += [h for s in snapshot.segments for h in s.missing]
    return tuple(dict.fromkeys(holes))


def _target(scene: Scene) -> Target:
    ports = scene.http_ports
    return Target(
        api_server_pids=tuple(m.pid for m in scene.servers),
        engine_pids=tuple(m.pid for m in scene.engines),
        worker_pids=tuple(m.pid for m in scene.workers),
        coordinator_pids=tuple(m.pid for m in scene.instance.of("DPCoordinator")),
        vllm_version=scene.version,
        port=ports[0] if ports else None,
    )


def _nobody(snapshot: Snapshot) -> Diagnosis:
    """No process of vLLM: only logs, limits and what dead servers left can be spoken of."""
    findings = _fold(list(loose_findings(snapshot)))
    left = "; what is left in /dev/shm cannot be attributed" if snapshot.segments else ", and no fault in the rest"
    verdict = _of_root(snapshot, findings) or Verdict(
        status="unknown",
        cause="unknown",
        layer=0,
        subject=Subject(role="Host", label="/dev/shm" if snapshot.segments else "vLLM"),
        since_s=None,
        confidence="low",
        summary=f"no vLLM process in this snapshot{left}",
    )
    layers = []
    for layer in range(1, 6):
        here = next((f for f in findings if f.layer == layer and f.severity != "info"), None)
        status: LayerStatus = "unknown" if here is None else "suspect" if here.folded_into else "fault"
        words = here.summary if here is not None else "no vLLM process"
        layers.append(LayerResult(layer=layer, name=LAYER_NAMES[layer], status=status, summary=words))
    return Diagnosis(
        tool=snapshot.tool,
        observed_at=snapshot.observed_at,
        window_s=snapshot.window_s,
        verdict=verdict,
        layers=tuple(layers),
        findings=tuple(findings),
        missing=missing_of(snapshot),
    )

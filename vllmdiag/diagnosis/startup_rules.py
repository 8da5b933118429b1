"""Layer 2: a start-up that waits for somebody, and endpoints that are gone."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Subject
from vllmdiag.vllm.instances import Member

from .case import Case

_PATIENCE_S = 30.0
"""A start-up younger than this is not called stuck: a machine may just be slow to schedule it."""


def startup_findings(case: Case) -> Iterator[Finding]:
    """All findings of layer 2."""
    if case.starting:
        yield from _incomplete(case)
    else:
        yield from _disconnected(case)
    yield from _paths_removed(case)


def _incomplete(case: Case) -> Iterator[Finding]:
    if case.starting_motion or any(case.halted(m.pid) for m in case.scene.instance.members if m.role != "Helper"):
        return
    seen = [m for m in case.scene.instance.members if case.acts[m.pid].seen]
    if not seen:
        return  # nobody's stack could be read: blind, and blind proves nothing
    waiting = [m for m in seen if case.acts[m.pid].doing]
    youngest = min((p.age_s for p in case.scene.processes.values() if p.age_s is not None), default=None)
    if youngest is not None and youngest < _PATIENCE_S:
        return
    deepest = _deepest(case, waiting) or waiting[0]
    absent = _absent(case)
    who = absent or case.scene.subject(deepest.pid)
    words = [f"{m.label} (pid {m.pid}): {case.acts[m.pid].doing}" for m in waiting]
    yield case.finding(
        "handshake-incomplete",
        who,
        (
            f"start-up waits for {who.label}, which has not come"
            if absent
            else f"start-up stands: {deepest.label} (pid {deepest.pid}) {case.acts[deepest.pid].doing}"
        ),
        evidence=[*words, f"no CPU, no reads and no change of stacks in {case.window_s:.1f} s"],
        chain=case.chain(deepest.pid),
        confidence="medium",
        since_s=youngest,
    )


def _deepest(case: Case, waiting: list[Member]) -> Member | None:
    """The member nearest to the work; of several, one that is not itself in a wait for the others."""
    order = {"Worker": 0, "RayWorker": 0, "EngineCore": 1, "Child": 2, "DPCoordinator": 4}
    known = [m for m in waiting if m.role in ("Worker", "EngineCore", "APIServer", "Launcher", "Driver", "Child")]
    if not known:
        return None
    return min(known, key=lambda m: (order.get(m.role, 3), case.acts[m.pid].state == "wait_start"))


def _absent(case: Case) -> Subject | None:
    """Who the arguments say must come and is not on this machine."""
    options = case.scene.options
    if options is None:
        return None
    if options.nnodes > 1:
        here = 1 + sum(1 for m in case.scene.instance.of("Launcher"))
        if not case.scene.engines:
            return Subject(role="EngineCore", label="the head node")
        if here < options.nnodes:
            return Subject(role="Worker", label=f"node {here if not options.headless else 0} of {options.nnodes}")
    engines = len(case.scene.engines)
    if options.headless and options.data_parallel_size > 1 and not case.scene.servers:
        return Subject(role="APIServer", label="the head node")
    local = options.data_parallel_size_local
    if local is not None and local < options.data_parallel_size and engines < options.data_parallel_size:
        missing = options.data_parallel_size - engines
        return Subject(role="EngineCore", label=f"{missing} remote EngineCore{'s' if missing > 1 else ''}")
    return None


def _disconnected(case: Case) -> Iterator[Finding]:
    """Server and engine both run, and no connection exists between them."""
    scene = case.scene
    fronts = [m for m in scene.instance.of("APIServer", "Driver") if not case.dead(m.pid)]
    for engine in scene.engines:
        if case.halted(engine.pid) or not fronts or not scene.sockets_known(engine.pid) or not case.in_loop(engine):
            continue
        known = [f for f in fronts if scene.sockets_known(f.pid)]
        if known and len(known) == len(fronts) and not any((f.pid, engine.pid) in scene.connected for f in known):
            yield case.finding(
                "endpoint-gone",
                engine.pid,
                f"{engine.label} (pid {engine.pid}) has no connection to any of its servers",
                evidence=[
                    f"no established socket between {engine.pid} and {', '.join(str(f.pid) for f in known)}",
                    *(f"path is gone: {p}" for p in scene.snapshot.ipc_paths_missing[:3]),
                ],
                chain=case.chain(known[0].pid, engine.pid),
                confidence="medium",
            )


def _paths_removed(case: Case) -> Iterator[Finding]:
    paths = case.scene.snapshot.ipc_paths_missing
    if not paths:
        return
    owners = {pid for path, (pid, _) in case.scene.ipc_peers.items() if path in paths}
    unconnected = [p for p in paths if p in case.scene.ipc_peers and not case.scene.ipc_peers[p][1]]
    subject = case.scene.subject(min(owners)) if owners else Subject(role="Host", label="host")
    yield case.finding(
        "ipc-path-removed",
        subject,
        f"{len(paths)} socket files were removed; "
        + ("connections that exist go on" if not unconnected else f"{len(unconnected)} of them have nobody connected"),
        evidence=list(paths[:3]),
    )

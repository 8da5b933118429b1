"""Layer 1: processes that are dead, stopped, stuck in the kernel, or left without their parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.process import Process
from vllmdiag.vllm.instances import Member

from .activity import STOPPED, UNINTERRUPTIBLE
from .case import Case
from .logs import server_waits
from .rings import BROADCAST
from .startup import stage_evidence, stages_left
from .waits import path_to

_UNAVAILABLE = 503
"""What /health answers once vLLM itself has marked its engine as dead."""
_WORKING = ("APIServer", "Launcher", "Driver", "EngineCore", "Worker", "RayWorker", "DPCoordinator", "Child")


def process_findings(case: Case) -> Iterator[Finding]:
    """All findings of layer 1, the deepest root first."""
    yield from _unkillable(case)
    # A rank that was missing when the window began died before all those that went within it.
    absent = list(_absent_workers(case))
    yield from absent or _deaths(case)
    yield from _orphans(case)
    yield from _orphans_beside(case)
    yield from _stopped(case)
    yield from _uninterruptible(case)


def _ticks(process: Process) -> str:
    return f"{process.cpu_s:.2f} s of CPU"


def _used(case: Case, process: Process) -> str:
    """CPU over the window; nothing where there was one look only."""
    return f", {_ticks(process)} in {case.window_s:.1f} s" if case.window_s else ""


def _unkillable(case: Case) -> Iterator[Finding]:
    for pid, process in case.scene.processes.items():
        if not process.sigkill_pending or len(process.samples) < 2 or process.state not in ("R", "D"):
            continue
        first, last = process.samples[0], process.samples[-1]
        if last.utime > first.utime:
            continue
        where = f" in {process.kernel_stack[0]}" if process.kernel_stack else ""
        yield case.finding(
            "driver-unkillable",
            pid,
            f"{case.label(pid)} (pid {pid}) has SIGKILL pending and does not die{where}",
            evidence=[
                "SIGKILL pending in /proc/PID/status",
                f"state {process.state} in every sample",
                f"user time stands, kernel time {last.stime - first.stime:+.2f} s",
            ],
            chain=case.chain(*path_to(case, pid)),
        )


def _deaths(case: Case) -> Iterator[Finding]:
    """Members that died within the window or lie there as zombies. The first to die is the root; the rest follow it."""
    dead = [m for m in case.scene.instance.members if m.role in _WORKING and case.dead(m.pid)]
    if not dead:
        return
    depth = {"EngineCore": 0, "Worker": 1, "RayWorker": 1}
    dead.sort(key=lambda m: (_died_at(case.scene.processes[m.pid]), depth.get(m.role, 2), m.pid))
    first = dead[0]
    also = [f"then {m.label} (pid {m.pid})" for m in dead[1:]]
    process = case.scene.processes[first.pid]
    how = (
        "is a zombie: dead, not reaped"
        if process.state == "Z"
        else f"vanished {_died_at(process):.1f} s into the window"
    )
    evidence = [f"pid {first.pid} {how}", *also, *_kernel_words(case, first.pid), *stages_left(case)]
    survivors = [m for m in case.scene.instance.members if m.role in _WORKING and not case.dead(m.pid)]
    if first.role in ("Worker", "RayWorker"):
        yield case.finding(
            "worker-dead",
            first.pid,
            f"{first.label} (pid {first.pid}) is dead",
            evidence=evidence,
            chain=case.chain(*path_to(case, first.pid)),
        )
    elif first.role == "EngineCore":
        yield case.finding(
            "engine-dead",
            first.pid,
            f"{first.label} (pid {first.pid}) is dead",
            evidence=evidence,
            chain=case.chain(*path_to(case, first.pid)),
        )
    elif not any(m.role in ("EngineCore", "Worker", "RayWorker") for m in survivors):
        yield case.finding(
            "unknown", first.pid, f"{first.label} (pid {first.pid}) ended within the window", evidence=evidence, layer=1
        )


def _died_at(process: Process) -> float:
    return next((s.t for s in process.samples if s.state in ("", "Z", "X")), 0.0)


def _kernel_words(case: Case, pid: int) -> list[str]:
    return [
        f"kernel: {k.text}"
        for k in case.scene.snapshot.kernel_lines
        if f" {pid} " in f" {k.text} " or f"[{pid}]" in k.text
    ]


def _orphans(case: Case) -> Iterator[Finding]:
    """What lives on without the process above it: engines without a server, workers without an engine."""
    scene = case.scene
    fronts = scene.instance.of("APIServer", "Launcher", "Driver")
    alive = [m for m in fronts if not case.dead(m.pid)]
    engines = [e for e in scene.engines if not case.dead(e.pid)]
    workers = [w for w in scene.workers if not case.dead(w.pid)]
    lost = [f"{m.label} (pid {m.pid}): {case.acts[m.pid].doing}" for m in fronts if case.dead(m.pid)]
    if engines and not alive and (lost or scene.instance.orphaned):
        yield _orphan_engine(case, engines, workers, lost)
    elif workers and not scene.engines and not _followers(case) and not scene.parents_unseen:
        names = ", ".join(f"{w.label} (pid {w.pid})" for w in workers)
        yield case.finding(
            "engine-dead",
            Subject(role="EngineCore", label="EngineCore"),
            f"the EngineCore is gone; {len(workers)} of its workers live on: {names}",
            evidence=[*lost, *_left(case, workers)],
            chain=tuple(case.link(w.pid) for w in workers),
        )
    elif refusals := [p for p in scene.probes if p.path == "/health" and p.status == _UNAVAILABLE]:
        engine = engines[0] if engines else None
        yield case.finding(
            "engine-dead",
            engine.pid if engine is not None else Subject(role="EngineCore", label="EngineCore"),
            "the server says that its engine is dead",
            evidence=[f"/health {refusals[0].status}", *(f"{m.label}: {case.acts[m.pid].doing}" for m in engines)],
            chain=case.chain(engine.pid) if engine is not None else (),
            confidence="medium",
        )
    elif scene.servers and alive and not scene.engines and case.listening and not _followers(case):
        if scene.snapshot.pasted and not any(p.ppid or p.age_s is not None for p in scene.snapshot.processes):
            return  # no process table: an engine that was not given may be there all the same
        server = scene.servers[0]
        yield case.finding(
            "engine-dead",
            Subject(role="EngineCore", label="EngineCore"),
            f"{server.label} (pid {server.pid}) listens, but there is no EngineCore behind it",
            evidence=["the server listens for HTTP", "it has no EngineCore among its children"],
            chain=case.chain(server.pid),
        )


def _orphan_engine(case: Case, engines: list[Member], workers: list[Member], lost: list[str]) -> Finding:
    engine = engines[0]
    also = f" (and {len(engines) - 1} more)" if len(engines) > 1 else ""
    return case.finding(
        "orphan-engine",
        engine.pid,
        f"{engine.label} (pid {engine.pid}){also} has no API server above it;"
        f" it and {len(workers)} workers serve nobody",
        evidence=[*lost, *_left(case, [*engines, *workers])],
        chain=tuple(case.link(m.pid) for m in [*engines, *workers]),
        pid=" ".join(str(e.pid) for e in engines),
    )


def _orphans_beside(case: Case) -> Iterator[Finding]:
    """What an earlier server has left, in evidence of one that does not serve: it holds what this one may need."""
    scene = case.scene
    works = case.listening or case.starting_motion or any(p.moved for p in case.progress.values())
    if not scene.snapshot.pasted or scene.instance.orphaned or works:
        return
    processes = {p.pid: p for p in scene.snapshot.processes}
    for other in scene.others:
        engines = [e for e in other.of("EngineCore") if processes[e.pid].state not in ("", "Z", "X")]
        if not (other.orphaned and engines):
            continue
        first = engines[0]
        yield case.finding(
            "orphan-engine",
            Subject(role="EngineCore", pid=first.pid, rank=first.ranks, label=first.label),
            f"{first.label} (pid {first.pid}) of an earlier server has no API server above it, and it lives beside a"
            " server that does not serve",
            evidence=[
                *[f"left: {m.label} {m.pid} {_state(processes[m.pid])}" for m in other.members][:6],
                *_gpu_memory(case, other.pids),
            ],
            severity="warning",
            confidence="medium",
            pid=" ".join(str(e.pid) for e in engines),
        )


def _left(case: Case, members: list[Member]) -> list[str]:
    processes = [case.scene.processes[m.pid] for m in members]
    names = ", ".join(f"{m.label} {m.pid} {_state(p)}" for m, p in zip(members, processes, strict=True))
    parents = ", ".join(str(ppid) for ppid in sorted({processes[0].ppid, *(p.ppid for p in processes[1:])})[:3])
    return [
        f"left: {names}; parents {parents}",
        *_no_port(case),
        *_holdings(case),
        *_gpu_memory(case, [m.pid for m in members]),
    ]


def _state(process: Process) -> str:
    """Its state in brackets; of pasted evidence it may not be known."""
    return f"({process.state})" if process.state.isalpha() else "(state not known)"


def _followers(case: Case) -> bool:
    """Engines may be on other nodes, or inside the script."""
    options = case.scene.options
    return options is not None and (options.headless or options.data_parallel_size_local == 0)


def _no_port(case: Case) -> list[str]:
    tcp = [s for s in case.scene.listeners if s.family != "unix" and s.send_q not in (100, 128, 4096)]
    return [] if tcp else ["none of them listens for HTTP"]


def _holdings(case: Case) -> list[str]:
    held = case.scene.segments
    if not held:
        return []
    resident = sum(s.resident or 0 for s in held)
    return [f"they hold {len(held)} segments of shared memory ({resident / 2**20:.1f} MiB resident)"]


def _gpu_memory(case: Case, pids: Sequence[int]) -> list[str]:
    """What the driver says they hold. Its pids are the host's, so only pasted evidence may be matched by them."""
    if not case.scene.snapshot.pasted:
        return []
    words = []
    for device in case.scene.snapshot.accelerators:
        held = [p.memory or 0 for p in device.processes or () if p.pid in pids]
        if held:
            words.append(f"{sum(held) / 2**30:.1f} GiB on GPU {device.index}")
    return [f"they hold {', '.join(words[:8])}"] if words else []


def _absent_workers(case: Case) -> Iterator[Finding]:
    """Ranks that the ring and the arguments ask for and nobody is."""
    scene = case.scene
    for engine in scene.engines:
        if case.starting or scene.instance.orphaned:
            continue
        workers = scene.instance.workers_of(engine.pid)
        if scene.snapshot.pasted and server_waits(scene.snapshot):
            continue  # a start-up, of which the table may have been taken at any moment
        if scene.snapshot.pasted and not (workers and all(scene.processes[m.pid].samples for m in (engine, *workers))):
            continue  # no process table: who was not given may be there all the same
        expected = _expected_workers(case, engine)
        if len(workers) >= expected or not (workers or _has_workers_of_its_own(case, engine)):
            continue
        present = {w.ranks.get("tp", w.ranks.get("pp", -1)) for w in workers}
        absent = [k for k in range(expected) if k not in present]
        key = "pp" if workers and workers[0].ranks.get("tp") is None and "pp" in workers[0].ranks else "tp"
        rank = absent[0] if absent else len(workers)
        label = f"Worker_{key.upper()}{rank}"
        ranks = {k: v for k, v in engine.ranks.items() if k == "dp"} | {key: rank}
        lost = Subject(role="Worker", rank=ranks, label=label)
        yield case.finding(
            "worker-dead",
            lost,
            f"{label} is gone: {len(workers)} of {expected} workers are left",
            evidence=[
                f"{expected} workers belong to {engine.label}, {len(workers)} are there",
                *(f"{m.label} (pid {m.pid}): {case.acts[m.pid].doing}" for m in (engine, *workers)),
            ],
            chain=(*case.chain(engine.pid, *_waiting_peer(case, workers)), Link(subject=lost, doing="gone")),
        )


def _has_workers_of_its_own(case: Case, engine: Member) -> bool:
    """Several ranks are asked for, and the engine shows nothing of Ray, whose workers are no children of it."""
    options, act = case.scene.options, case.acts[engine.pid]
    if options is None or options.world_size <= 1 or not act.seen:
        return False
    return not any("ray/" in frame.file for thread in act.threads for frame in thread.frames)


def _waiting_peer(case: Case, workers: Sequence[Member]) -> list[int]:
    """A worker that waits in a collective, for the one who is gone."""
    return [w.pid for w in workers if case.acts[w.pid].state == "collective" and not case.dead(w.pid)][:1]


def _expected_workers(case: Case, engine: Member) -> int:
    """Workers of this machine that the engine has: one for each reader of its ring, else as the arguments say."""
    ring = next((r for r in case.rings if r.queue == BROADCAST and r.writer == engine.pid), None)
    if ring is not None:
        return ring.geometry.n_readers
    options = case.scene.options
    if options is None or options.nnodes > 1 or options.executor_backend in ("ray", "external_launcher"):
        return 0
    # Before V1 the engine is rank 0 itself.
    workers = [case.acts[w.pid] for w in case.scene.instance.workers_of(engine.pid)]
    frames = [frame.file for act in workers if act.main is not None for frame in act.main.frames]
    return options.world_size - any(file.endswith("vllm/executor/multiproc_worker_utils.py") for file in frames)


def _stopped(case: Case) -> Iterator[Finding]:
    stopped = [m for m in case.scene.instance.members if m.role in _WORKING and case.acts[m.pid].kind == STOPPED]
    # The deepest one is the root of the waits: a worker before its engine before the server.
    stopped.sort(
        key=lambda m: ({"Worker": 0, "RayWorker": 0, "Child": 1, "EngineCore": 2}.get(m.role, 3), m.depth * -1)
    )
    for member in stopped[:1]:
        process = case.scene.processes[member.pid]
        since = case.since(member.pid)
        state = case.acts[member.pid].doing
        yield case.finding(
            "process-stopped",
            member.pid,
            f"{member.label} (pid {member.pid}) is {state}",
            evidence=[
                f"stat of {member.pid}: {process.state}{_used(case, process)}"
                + (f", last ran {since:.0f} s ago" if since is not None else ""),
                *stage_evidence(case, member.pid),
                *(f"{m.label} (pid {m.pid}) is {case.acts[m.pid].doing} too" for m in stopped[1:]),
                *waiting_evidence(case, member),
            ],
            chain=case.chain(*path_to(case, member.pid)),
            since_s=since,
        )


def waiting_evidence(case: Case, member: Member) -> list[str]:
    """What the others show of the wait for this member: unread slots, collectives, unread bytes."""
    words = []
    for ring in case.rings:
        for reader, slots in ring.stuck.items():
            if reader < len(ring.readers) and ring.readers[reader] == member.pid:
                words.append(
                    f"{ring.queue} ring: slot {','.join(map(str, slots))} not read by reader {reader} ({member.label})"
                )
    peers = [w for w in case.scene.workers if w.engine_pid == member.engine_pid and w.pid != member.pid]
    if member.role == "Worker":
        for peer in peers:
            act = case.acts[peer.pid]
            if act.state == "collective" and act.main is not None:
                n = len(act.main.stacks)
                words.append(f"{peer.label} in {act.doing} in {n} of {act.main.dumps} stacks")
    for sock in case.scene.snapshot.sockets:
        if member.pid in sock.pids and len(sock.samples) >= 2 and all(s.recv_q > 0 for s in sock.samples):
            what = "connections not accepted" if sock.state == "LISTEN" else "B not read"
            words.append(f"{sock.samples[-1].recv_q} {what} on {sock.local or 'a socket'} of {member.label}")
    return words[:6]


def _uninterruptible(case: Case) -> Iterator[Finding]:
    for member in case.scene.instance.members:
        if member.role in _WORKING and case.acts[member.pid].kind == UNINTERRUPTIBLE:
            process = case.scene.processes[member.pid]
            if process.sigkill_pending or (case.starting and case.motion[member.pid]):
                continue  # a slow disk may take longer than a short window for one read
            looks, main = len(process.samples), case.acts[member.pid].main
            lasts = looks > 1 or (main is not None and main.dumps > 1 and main.still)
            if not lasts and any(progress.moved for progress in case.progress.values()):
                continue  # one moment of a server at work
            yield case.finding(
                "process-uninterruptible" if lasts else "unknown",
                member.pid,
                f"{member.label} (pid {member.pid}) is {case.acts[member.pid].doing}"
                + ("" if lasts else "; one look only: for a moment that is normal; look twice, 30 s apart"),
                evidence=[f"state D in {looks} of {looks} samples{_used(case, process)}"],
                chain=case.chain(*path_to(case, member.pid)),
                confidence="medium" if looks > 1 else "low",
                severity=None if lasts else "warning",  # what the log says for sure comes first
                layer=None if lasts else 1,
                since_s=case.since(member.pid),
            )

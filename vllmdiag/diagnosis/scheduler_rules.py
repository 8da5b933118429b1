"""Layer 3: an engine busy with itself, or out of step with the others of its data-parallel group."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding
from vllmdiag.model.process import Frame
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.signatures import match

from .activity import IDLE, Activity, ThreadView
from .case import Case
from .logs import event_words
from .motion import deferred, gauge

_FULL = 0.9
"""Share of the KV cache above which a request cannot be placed."""
_WORKS = 0.5
"""Cores: a thread that uses as much computes."""
_ALL_THE_TIME = 0.9
"""Cores: a thread that uses as much has done nothing else, so one dump tells what."""
_TOKENS = ("generation_tokens_total", "prompt_tokens_total")


def scheduler_findings(case: Case, engine: Member) -> Iterator[Finding]:
    """What holds the engine up inside itself; nothing for one that starts, or that is not seen."""
    act = case.acts[engine.pid]
    if not case.starting and not act.seen:
        yield from _parked_unseen(case, engine)
    if case.starting or not act.seen:
        return
    found = (
        _livelock(case, engine, act)
        or _parked(case, engine, act)
        or _wave_split(case, engine, act)
        or _grammar(case, engine, act)
    )
    if found is not None:
        yield found


def grammar_findings(case: Case) -> Iterator[Finding]:
    """Grammars that are compiled where no EngineCore is: vLLM before V1 did it beside its server."""
    for member in case.scene.instance.of("APIServer", "Driver", "Child"):
        if (found := _grammar(case, member, case.acts[member.pid])) is not None:
            yield found


def _shows(view: ThreadView | None, signature: str, role: str = "EngineCore") -> bool:
    """Every dump of the thread shows the signature."""
    return (
        view is not None
        and bool(view.stacks)
        and len(view.stacks) == view.dumps
        and all(any(m.signature.id == signature for m in match(s.frames, role)) for s in view.stacks)
    )


def _frame_of(view: ThreadView, signature: str) -> Frame:
    """The frame of the last dump that shows the signature."""
    depth = next(m.depth for m in match(view.frames) if m.signature.id == signature)
    return view.frames[depth]


def _tokens_move(case: Case, *engines: Member) -> bool:
    return any(word.startswith(_TOKENS) for e in engines for word in case.progress[e.pid].moved)


def _livelock(case: Case, engine: Member, act: Activity) -> Finding | None:
    """It schedules again and again and nothing comes of it: the cache is full of blocks that no request uses."""
    scene, progress = case.scene, case.progress[engine.pid]
    running = gauge(scene, engine, "num_requests_running")
    waiting = gauge(scene, engine, "num_requests_waiting")
    usage = gauge(scene, engine, "kv_cache_usage_perc")
    if running != 0 or not waiting or usage is None or usage < _FULL or deferred(scene, engine):
        return None
    if not progress.counters_known or _tokens_move(case, engine) or not _shows(act.main, "sched.step"):
        return None
    capacity = gauge(scene, engine, "num_requests_waiting_by_reason:capacity")
    return case.finding(
        "scheduler-livelock",
        engine.pid,
        f"{engine.label} (pid {engine.pid}) schedules and nothing runs: {waiting:g} requests wait for room,"
        f" and {usage:.0%} of the KV cache is held by no running request",
        evidence=[
            f"0 running, {waiting:g} waiting" + (f" ({capacity:g} for capacity)" if capacity else ""),
            f"kv_cache_usage_perc {usage:g}, no token in the window",
            f"main thread {act.doing} in every stack" + (f", {act.cpu:.2f} cores" if act.cpu else ""),
        ],
        chain=case.chain(engine.pid),
        confidence="high" if capacity or not has_connector(case, act) else "medium",
    )


def has_connector(case: Case, act: Activity) -> bool:
    """A KV connector is configured, or shows in the threads of a process."""
    if any("--kv-transfer-config" in p.title for p in case.scene.processes.values()):
        return True
    files = {f.file for thread in act.threads for f in thread.frames}
    return any("kv_transfer" in file or "lmcache" in file for file in files)


def parked_words(case: Case, engine: Member) -> list[str]:
    """What shows that unfinished requests of an engine wait for KV blocks of another instance; empty where nothing."""
    gauges = case.progress[engine.pid].gauges
    logged = [
        event_words(event)
        for digest in case.scene.snapshot.logs
        for event in (digest.first_error, *digest.other_errors)
        if event is not None and event.kind == "kv_remote_wait" and event.generation == digest.generations
    ]
    if not gauges and gauge(case.scene, engine, "num_requests_waiting") is not None:
        return []  # what the log tells of is over
    remote = logged or deferred(case.scene, engine) or has_connector(case, case.acts[engine.pid])
    return [*logged[:2], *gauges] if remote else []


def _parked(case: Case, engine: Member, act: Activity) -> Finding | None:
    """It schedules, no token comes, and what it has are requests that wait for their KV blocks."""
    words = parked_words(case, engine)
    if not words or case.progress[engine.pid].moved or not _shows(act.main, "sched.step"):
        return None
    if gauge(case.scene, engine, "num_requests_running"):
        return None
    return case.finding(
        "wait-remote-kv",
        engine.pid,
        f"{engine.label} (pid {engine.pid}) has only requests that wait for KV blocks of another instance",
        evidence=[*words, f"main thread {act.doing} in every stack"],
        chain=case.chain(engine.pid),
        confidence="medium",
    )


def _parked_unseen(case: Case, engine: Member) -> Iterator[Finding]:
    """The same for an engine whose stack was not pasted: by its counters, and a connect that hangs.

    Without either of the two, requests that wait may as well wait for an engine that is stuck.
    """
    words, progress = parked_words(case, engine), case.progress[engine.pid]
    own = {engine.pid, *(w.pid for w in case.scene.instance.workers_of(engine.pid))}
    hanging = [s for s in case.scene.snapshot.sockets if s.state == "SYN-SENT" and own & set(s.pids)]
    known = progress.counters_known and not progress.moved and gauge(case.scene, engine, "num_requests_running") == 0
    if words and known and (deferred(case.scene, engine) or hanging):
        yield case.finding(
            "wait-remote-kv",
            engine.pid,
            f"{engine.label} (pid {engine.pid}) runs nothing, and its requests wait for KV blocks of another instance",
            evidence=[*words, *(f"a connect to {s.remote} hangs" for s in hanging[:2])],
            chain=case.chain(engine.pid),
            confidence="medium",
        )


def _grammar(case: Case, engine: Member, act: Activity) -> Finding | None:
    """A thread compiles one grammar in every dump, and computes."""
    for view in act.threads:
        own = [engine] if engine.pid in case.progress else list(case.scene.engines)
        moved = [word for e in own for word in case.progress[e.pid].moved]
        if not _shows(view, "grammar.compile", "") or (view is act.main and (moved or not view.still)):
            continue
        cpu = view.cpu or 0.0
        waiting = gauge(case.scene, engine, "num_requests_waiting")
        works = cpu >= _WORKS or all(s.active or s.owns_gil for s in view.stacks)
        stood = waiting and own and not moved and all(case.progress[e.pid].counters_known for e in own)
        if not works or (view.dumps < 2 and cpu < _ALL_THE_TIME and not stood):
            continue
        others = _tokens_move(case, *own)
        frame = _frame_of(view, "grammar.compile")
        return case.finding(
            "grammar-busy",
            engine.pid,
            f"thread {view.name} of {engine.label} (pid {engine.pid}) compiles a grammar all the time"
            + (": other requests go on" if others else ", and no token comes" if own else ""),
            evidence=[
                f"{frame.name} ({frame.file}:{frame.line}) in {view.dumps} of {view.dumps} dumps"
                + (f", {view.cpu:.2f} cores" if view.cpu is not None else ""),
                *([f"{waiting:g} requests wait"] if waiting else []),
                *moved[:1],
            ],
            chain=case.chain(engine.pid),
            severity="warning" if others else "critical",
            confidence="high" if view.still else "medium",
        )
    return None


def _wave_split(case: Case, engine: Member, act: Activity) -> Finding | None:
    """It waits in a collective of the data-parallel group for an engine that waits for requests."""
    progress = case.progress[engine.pid]
    workers = case.scene.instance.workers_of(engine.pid)
    stands = [
        view
        for view in (act.main, *(case.acts[w.pid].main for w in workers))
        if _shows(view, "dp.sync") or _shows(view, "dp.sync", "Worker")
    ]
    if not stands or progress.moved:
        return None
    idle = [
        e
        for e in case.scene.engines
        if e.pid != engine.pid
        and case.acts[e.pid].kind == IDLE
        and not case.progress[e.pid].moved
        and not case.progress[e.pid].outstanding
    ]
    if not idle:
        return None
    lost = idle[0]
    return case.finding(
        "dp-wave-split",
        lost.pid,
        f"{engine.label} waits in a collective of all engines, and {lost.label} (pid {lost.pid}) waits for requests:"
        " one works and the other believes that there is nothing to do",
        evidence=[
            f"{engine.label}: {act.doing}",
            *(f"{w.label}: {case.acts[w.pid].doing}" for w in workers[:2]),
            *(f"{e.label}: {case.acts[e.pid].doing} in every stack" for e in idle),
            *progress.outstanding[:2],
        ],
        chain=[*case.chain(engine.pid), case.link(lost.pid)],
        confidence="high" if act.still or workers else "medium",
    )

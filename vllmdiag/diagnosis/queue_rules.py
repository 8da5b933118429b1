"""Layers 3 and 4: what holds up an engine whose work does not move. The waits are followed down to the one who waits for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..model.base import Missing
from ..model.diagnosis import Finding
from ..vllm.instances import Member
from ..vllm.threads import expected
from ..vllm.versions import in_range, parse
from .activity import IDLE, STOPPED, Activity
from .case import Case
from .process_rules import waiting_evidence
from .rings import Ring
from .waits import absent_from, laggards, path_to, unread_replies

_RECHECK_SINCE = "0.29.0"
_RECHECK_S = 5.0
"""Readers of 0.29 and later look at the flag again after this long (SHM_READER_RECHECK_INTERVAL_MS)."""


def queue_findings(case: Case) -> Iterator[Finding]:
    """Roots of engines that do not move, and what is wrong with rings and threads even while they do."""
    for engine in case.scene.engines:
        if case.halted(engine.pid):
            continue
        found = list(_threads(case, engine))
        if not found and case.progress[engine.pid].frozen and not case.starting:
            found = list(_held_up(case, engine))
        yield from found
    yield from _broken_rings(case)


def _held_up(case: Case, engine: Member) -> Iterator[Finding]:
    act = case.acts[engine.pid]
    workers = case.scene.instance.workers_of(engine.pid)
    if any(case.halted(w.pid) for w in workers):
        return  # layer 1 has named the root
    if act.kind == IDLE:
        yield from _idle_with_work(case, engine, act)
        return
    if act.seen and act.state not in ("wait_response", "wait_readers", "wait_start") and not workers:
        yield from _alone(case, engine, act)
        return
    behind = laggards(case, engine)
    if act.state == "wait_readers" and not behind and not workers:
        yield _undecided(case, engine, 3, "the ring is full and its readers are not visible here")
        return
    ring = _broadcast(case, engine)
    if ring is not None and ring.full:
        yield _full(case, engine, ring, behind)
        return
    asleep = [(w, slots) for w, slots in behind if case.acts[w.pid].state == "idle" and not case.acts[w.pid].on_cpu]
    if asleep:
        yield _lost_wakeup(case, engine, *asleep[0])
        return
    busy = [w for w in workers if _computes(case.acts[w.pid])]
    waiting_on_gpu = [w for w in workers if case.acts[w.pid].state == "gpu_wait"]
    in_collective = [w for w in workers if case.acts[w.pid].state == "collective"]
    unseen = [w for w in workers if not case.acts[w.pid].seen]
    if busy:
        yield _busy(case, engine, busy)
    elif unseen:
        yield _unseen(case, engine, unseen)
    elif in_collective:
        yield _collective(case, engine, in_collective, workers)
    elif waiting_on_gpu:
        yield _undecided(
            case,
            engine,
            4,
            f"{_names(waiting_on_gpu)} wait for the GPU ({case.acts[waiting_on_gpu[0].pid].doing}) and nothing moves",
        )
    elif workers and all(case.acts[w.pid].state == "idle" for w in workers):
        yield from _all_idle(case, engine, act)
    else:
        yield _undecided(case, engine, 3, "work is outstanding and nothing moved")


def _computes(act: Activity) -> bool:
    """Inside some call that is no known wait: Python, a compile, a load, a method of the user."""
    return act.seen and act.state not in (
        "idle",
        "collective",
        "gpu_wait",
        "wait_response",
        "wait_readers",
        "wait_start",
    )


def _broadcast(case: Case, engine: Member) -> Ring | None:
    return next((r for r in case.rings if r.queue == "broadcast" and r.writer == engine.pid), None)


def _names(members: list[Member]) -> str:
    return ", ".join(m.label for m in members)


def _evidence(case: Case, engine: Member) -> list[str]:
    return list(case.progress[engine.pid].outstanding[:3])


def _full(case: Case, engine: Member, ring: Ring, behind: list[tuple[Member, tuple[int, ...]]]) -> Finding:
    n = ring.geometry.chunks
    if not behind:
        return case.finding(
            "ring-full-slow-reader", engine.pid, f"the broadcast ring is full ({n}/{n}); the reader that lags is not visible here",
            evidence=_evidence(case, engine), chain=case.chain(engine.pid), confidence="low",
        )  # fmt: skip
    worker, slots = max(behind, key=lambda pair: len(pair[1]))
    act = case.acts[worker.pid]
    doing = act.doing if act.seen else "not visible"
    if act.seen and act.state == "idle" and not act.on_cpu:
        return _lost_wakeup(case, engine, worker, slots)
    words = [
        f"broadcast ring: {len(slots)} of {n} slots unread by {worker.label} in all of {ring.segment.polls} looks",
        f"{engine.label}: {case.acts[engine.pid].doing}",
        f"{worker.label}: {doing}" + (", the same in every stack" if act.still else ""),
    ]
    return case.finding(
        "ring-full-slow-reader", worker.pid,
        f"the broadcast ring is full: {worker.label} (pid {worker.pid}) reads nothing, {doing}",
        evidence=words, chain=case.chain(*path_to(case, worker.pid)),
        confidence="high" if act.seen else "medium", since_s=ring.still_s,
    )  # fmt: skip


def _lost_wakeup(case: Case, engine: Member, worker: Member, slots: tuple[int, ...]) -> Finding:
    version = parse(case.scene.version) if case.scene.version else None
    rechecks = version is not None and in_range(version, _RECHECK_SINCE, None)
    ring = _broadcast(case, engine)
    still = ring.still_s if ring is not None else None
    sure = version is not None and (not rechecks or (still or 0.0) > _RECHECK_S)
    frame = case.acts[worker.pid].frame
    words = [
        f"slot {','.join(map(str, slots))} of the broadcast ring is published and unread by {worker.label} in every look",
        f"{worker.label} sleeps in {frame.name if frame is not None else 'dequeue'} in every stack",
        f"vLLM {case.scene.version or 'of unknown version'}"
        + (f" looks again every {_RECHECK_S:.0f} s" if rechecks else " never looks again" if version else ""),
    ]
    return case.finding(
        "lost-wakeup", worker.pid, f"a message is published and {worker.label} (pid {worker.pid}) sleeps on",
        evidence=words, chain=case.chain(*path_to(case, worker.pid)), confidence="high" if sure else "medium", since_s=still,
    )  # fmt: skip


def _busy(case: Case, engine: Member, busy: list[Member]) -> Finding:
    # The one that holds the others up: behind in the ring first, then the one that others wait for in a collective.
    behind = {w.pid for w, _ in laggards(case, engine)}
    worker = min(busy, key=lambda w: (w.pid not in behind, not case.acts[w.pid].still, w.pid))
    act = case.acts[worker.pid]
    words = [
        f"{worker.label}: {act.doing}",
        f"{'the same frames' if act.still else 'changing frames'} in {len(act.main.stacks) if act.main else 0} stacks, {act.cpu:.2f} cores",
        *waiting_evidence(case, worker),
        *_evidence(case, engine),
    ]
    others = [b.label for b in busy if b.pid != worker.pid]
    if others:
        words.append(f"busy too: {', '.join(others)}")
    moves = act.on_cpu or not act.still
    if moves and not act.still:
        # It computes and its stack changes: a long step, not a stuck one.
        return case.finding(
            "busy", worker.pid, f"{worker.label} (pid {worker.pid}) is in a long step: {act.doing}", evidence=words,
            severity="info", confidence="medium", chain=case.chain(*path_to(case, worker.pid)),
        )  # fmt: skip
    return case.finding(
        "worker-busy", worker.pid, f"{worker.label} (pid {worker.pid}) is inside one call: {act.doing.removeprefix('in ')}; {engine.label} waits for it",
        evidence=words, chain=case.chain(*path_to(case, worker.pid)),
        severity="warning" if moves else "critical", confidence="high",
    )  # fmt: skip


def _unseen(case: Case, engine: Member, unseen: list[Member]) -> Finding:
    worker = unseen[0]
    return case.finding(
        "rank-never-answered", worker.pid,
        f"{engine.label} waits for {_names(unseen)}, whose stacks cannot be read here",
        evidence=_evidence(case, engine), chain=case.chain(*path_to(case, worker.pid)), confidence="low",
    )  # fmt: skip


def _collective(case: Case, engine: Member, inside: list[Member], workers: tuple[Member, ...]) -> Finding:
    absent = absent_from(case, inside[0], workers)
    ops = {case.acts[w.pid].doing for w in inside}
    words = [f"{w.label}: {case.acts[w.pid].doing}" + (", still" if case.acts[w.pid].still else "") for w in workers]
    if absent:
        root = absent[0]
        return case.finding(
            "collective-divergence", root.pid,
            f"{_names(inside)} wait in {'/'.join(sorted(ops))}; {root.label} (pid {root.pid}) is not in it: {case.acts[root.pid].doing}",
            evidence=[*words, *_evidence(case, engine)], chain=case.chain(*path_to(case, root.pid)),
            confidence="high" if all(case.acts[w.pid].still for w in workers) else "medium",
        )  # fmt: skip
    if len(ops) > 1:
        groups = {op: [w for w in inside if case.acts[w.pid].doing == op] for op in ops}
        root = min(groups.values(), key=len)[0]
        return case.finding(
            "collective-divergence", root.pid,
            f"ranks are in different collectives: " + "; ".join(f"{_names(ws)} in {op}" for op, ws in sorted(groups.items())),
            evidence=[*words, *_evidence(case, engine)], chain=case.chain(*path_to(case, root.pid)), confidence="medium",
        )  # fmt: skip
    remote = _remote_ranks(case, engine, workers)
    if remote:
        return case.finding(
            "rank-never-answered", engine.pid, f"all local ranks wait in {ops.pop()}; {remote} ranks are on other nodes",
            evidence=[*words, *_evidence(case, engine)], chain=case.chain(engine.pid), layer=4, confidence="medium",
        )  # fmt: skip
    return _undecided(
        case, engine, 4, f"all ranks are in {ops.pop()} and nothing moves: the collective itself does not finish"
    )


def _remote_ranks(case: Case, engine: Member, workers: tuple[Member, ...]) -> int:
    options = case.scene.options
    return max(0, options.world_size - len(workers)) if options is not None and options.nnodes > 1 else 0


def _all_idle(case: Case, engine: Member, act: Activity) -> Iterator[Finding]:
    replies = unread_replies(case, engine)
    workers = case.scene.instance.workers_of(engine.pid)
    if replies and act.state == "wait_response":
        writer, slots = replies[0]
        yield case.finding(
            "lost-wakeup", engine.pid,
            f"a reply of {writer.label if writer else 'a worker'} is published and {engine.label} (pid {engine.pid}) sleeps on",
            evidence=[f"response ring: slot {','.join(map(str, slots))} unread in every look", *_evidence(case, engine)],
            chain=case.chain(engine.pid), confidence="medium",
        )  # fmt: skip
        return
    if _remote_ranks(case, engine, workers):
        yield case.finding(
            "rank-never-answered", engine.pid,
            f"every rank of this node is idle; {engine.label} waits for {_remote_ranks(case, engine, workers)} ranks on other nodes",
            evidence=_evidence(case, engine), chain=case.chain(engine.pid), confidence="medium",
        )  # fmt: skip
        return
    if act.state == "wait_response" and case.rings and not laggards(case, engine):
        yield case.finding(
            "lost-message", engine.pid,
            f"{engine.label} (pid {engine.pid}) waits for a reply while all {len(workers)} workers are idle and every ring is read",
            evidence=[*_evidence(case, engine), *(f"{w.label}: {case.acts[w.pid].doing}" for w in workers)],
            chain=case.chain(engine.pid, *(w.pid for w in workers[:1])),
            confidence="high" if act.still else "medium",
        )  # fmt: skip
        return
    yield _undecided(case, engine, 3, "engine and workers wait for each other")


def _idle_with_work(case: Case, engine: Member, act: Activity) -> Iterator[Finding]:
    replies = unread_replies(case, engine)
    if replies:
        writer, slots = replies[0]
        n = sum(len(s) for _, s in replies)
        yield case.finding(
            "response-skew", writer.pid if writer else engine.pid,
            f"{n} repl{'y lies' if n == 1 else 'ies lie'} unread in the response ring of {writer.label if writer else 'a worker'}"
            f" while {engine.label} is idle: the next call will take it for its own",
            evidence=[
                f"response ring of {w.label if w else '?'}: slot {','.join(map(str, s))} unread in every look" for w, s in replies
            ] + [f"{engine.label}: {act.doing} in every stack"],
            chain=case.chain(engine.pid, *([writer.pid] if writer else [])),
        )  # fmt: skip
        return
    behind = laggards(case, engine)
    if behind:
        worker, slots = behind[0]
        other = case.acts[worker.pid]
        if other.state == "idle" and not other.on_cpu:
            yield _lost_wakeup(case, engine, worker, slots)
        elif _computes(other):
            yield _busy(case, engine, [worker])
        else:
            workers = case.scene.instance.workers_of(engine.pid)
            inside = [w for w in workers if case.acts[w.pid].state == "collective"]
            yield (
                _collective(case, engine, inside, workers)
                if inside
                else _undecided(case, engine, 3, f"{worker.label} does not read its messages: {other.doing}")
            )
        return
    if any("requests" in words for words in case.progress[engine.pid].outstanding):
        yield case.finding(
            "wait-remote-kv" if _has_connector(case, engine) else "unknown", engine.pid,
            f"{engine.label} (pid {engine.pid}) is idle although requests are unfinished", layer=3,
            evidence=_evidence(case, engine), chain=case.chain(engine.pid), confidence="medium",
        )  # fmt: skip


def _has_connector(case: Case, engine: Member) -> bool:
    cmdline = [p.cmdline for p in case.scene.processes.values() if not isinstance(p.cmdline, Missing)]
    if any("--kv-transfer-config" in argument for line in cmdline for argument in line):
        return True
    files = {f.file for t in case.acts[engine.pid].threads for f in t.frames}
    return any("kv_transfer" in file or "lmcache" in file for file in files)


def _alone(case: Case, engine: Member, act: Activity) -> Iterator[Finding]:
    """An engine that runs the model itself (no workers: TP=1 on GPUs)."""
    if act.state in ("gpu_wait", "collective") and act.still:
        yield _undecided(case, engine, 4, f"{engine.label} is in {act.doing} in every stack and nothing moves")
    elif act.still:
        yield case.finding(
            "worker-busy", engine.pid, f"{engine.label} (pid {engine.pid}) is inside one call: {act.doing}",
            evidence=_evidence(case, engine), chain=case.chain(engine.pid), severity="warning" if act.on_cpu else "critical",
        )  # fmt: skip


def _undecided(case: Case, engine: Member, layer: int, summary: str) -> Finding:
    workers = case.scene.instance.workers_of(engine.pid)
    words: list[Any] = [f"{m.label}: {case.acts[m.pid].doing}" for m in (engine, *workers)]
    return case.finding(
        "unknown", engine.pid, summary, evidence=[*_evidence(case, engine), *words], layer=layer,
        chain=case.chain(engine.pid), confidence="low",
    )  # fmt: skip


def _threads(case: Case, engine: Member) -> Iterator[Finding]:
    """The engine's socket threads: gone, or stuck outside their poll."""
    act = case.acts[engine.pid]
    if act.main is None or act.main.dumps < 2 or not case.in_loop(engine) or act.kind == STOPPED:
        return
    for thread in expected("EngineCore", case.scene.version):
        if not thread.required or "process_" not in thread.name:
            continue
        view = act.thread(thread.name)
        if view is None:
            yield case.finding(
                "input-thread-dead", engine.pid,
                f"{engine.label} (pid {engine.pid}) has no thread {thread.name} any more",
                evidence=[f"threads seen in {act.main.dumps} dumps: " + ", ".join(t.name for t in act.threads)],
                chain=case.chain(engine.pid), confidence="high" if case.scene.version else "medium",
            )  # fmt: skip
        elif view.still and act.kind == IDLE and not _at_rest(view.frames):
            top = view.frames[0]
            yield case.finding(
                "input-thread-stuck", engine.pid,
                f"thread {thread.name} of {engine.label} (pid {engine.pid}) is stuck in {top.name}",
                evidence=[
                    f"{top.name} ({top.file}:{top.line}) in {view.dumps} of {view.dumps} dumps"
                    + (f", {view.cpu:.2f} cores" if view.cpu is not None else ""),
                    *_evidence(case, engine),
                ],
                chain=case.chain(engine.pid),
            )  # fmt: skip


_REST = ("poll", "recv", "recv_multipart", "wait", "get", "select")


def _at_rest(frames: tuple[Any, ...]) -> bool:
    """It sleeps in its own poll or queue: the innermost frame is a wait, right above the thread's own function."""
    depth = next((i for i, f in enumerate(frames) if "process_" in f.name and "_socket" in f.name), len(frames))
    return depth == 0 or frames[0].name.rsplit(".", 1)[-1] in _REST


def _broken_rings(case: Case) -> Iterator[Finding]:
    for ring in case.rings:
        if ring.sampled and ring.history and all(state.problems for _, state in ring.history):
            problem = ring.history[-1][1].problems[0]
            yield case.finding(
                "ring-inconsistent", ring.writer or case.scene.instance.roots[0],
                f"{ring.segment.name}: {problem}", evidence=[f"{ring.segment.polls} looks, geometry from {ring.geometry_known_by}"],
                confidence="medium", severity="warning" if not ring.queue else "critical",
            )  # fmt: skip

"""The wait-for graph: who waits for whom, by what evidence; and the way from an engine down to whoever holds it up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from vllmdiag.vllm.instances import Member

from .activity import IDLE, WAITING
from .case import Case
from .rings import BROADCAST, RESPONSE, Ring


@dataclass(frozen=True)
class Wait:
    """One edge: `waiter` cannot go on before `on` does something."""

    waiter: int
    on: int
    layer: int
    why: str


@lru_cache(maxsize=1)
def waits_of(case: Case) -> tuple[Wait, ...]:
    """Every wait that the evidence shows, client side first."""
    found: list[Wait] = []
    for engine in case.scene.engines:
        found += _on_engine(case, engine)
        found += _on_workers(case, engine)
        found += _in_collectives(case, engine)
    return tuple(dict.fromkeys(found))


def _on_engine(case: Case, engine: Member) -> list[Wait]:
    progress = case.progress[engine.pid]
    fronts = case.scene.instance.of("APIServer", "Launcher", "Driver")
    found = []
    for front in fronts:
        act = case.acts[front.pid]
        if act.state == "wait_start" or not case.in_loop(engine):
            found.append(Wait(front.pid, engine.pid, 2, "waits for the engine to be ready"))
        elif progress.outstanding:
            found.append(Wait(front.pid, engine.pid, 2, progress.outstanding[0]))
    found += [
        Wait(worker.pid, engine.pid, 3, "idle in dequeue: nothing published")
        for worker in case.scene.instance.workers_of(engine.pid)
        if case.acts[worker.pid].state == "idle"
    ]
    return found


def _on_workers(case: Case, engine: Member) -> list[Wait]:
    act = case.acts[engine.pid]
    workers = case.scene.instance.workers_of(engine.pid)
    found = [
        Wait(engine.pid, worker.pid, 3, f"{len(slots)} slot{'s' * (len(slots) > 1)} of the broadcast ring unread by it")
        for worker, slots in laggards(case, engine)
    ]
    if act.state in ("wait_response", "wait_start") or not act.seen:
        layer = 2 if act.state == "wait_start" else 3
        found += [
            Wait(engine.pid, worker.pid, layer, "its reply has not come")
            for worker in workers
            if case.acts[worker.pid].kind != IDLE
        ]
    return found


def _in_collectives(case: Case, engine: Member) -> list[Wait]:
    found = []
    workers = case.scene.instance.workers_of(engine.pid)
    for waiter in workers:
        if case.acts[waiter.pid].state != "collective":
            continue
        words = f"in {case.acts[waiter.pid].doing}; it has not entered"
        found += [Wait(waiter.pid, other.pid, 4, words) for other in absent_from(case, waiter, workers)]
    return found


def absent_from(case: Case, waiter: Member, workers: tuple[Member, ...]) -> list[Member]:
    """Ranks of the same engine that are not in a collective while `waiter` is."""
    return [
        w for w in workers if w.pid != waiter.pid and (case.halted(w.pid) or case.acts[w.pid].state != "collective")
    ]


def laggards(case: Case, engine: Member) -> list[tuple[Member, tuple[int, ...]]]:
    """Workers that left slots of the broadcast ring unread over the whole window, with the slots."""
    found = []
    for ring in case.rings:
        if ring.queue != BROADCAST or ring.writer != engine.pid:
            continue
        for reader, slots in ring.stuck.items():
            pid = ring.readers[reader] if reader < len(ring.readers) else None
            if pid is not None and pid in case.scene.members:
                found.append((case.scene.members[pid], slots))
    return found


def broadcast_ring(case: Case, engine: Member) -> Ring | None:
    """The ring that the engine writes its calls to."""
    return next((r for r in case.rings if r.queue == BROADCAST and r.writer == engine.pid), None)


def unread_replies(case: Case, engine: Member) -> list[tuple[Member | None, tuple[int, ...]]]:
    """Response rings with replies that the engine left unread over the whole window: (their writer, the slots)."""
    return [
        (case.scene.members.get(ring.writer or 0), ring.stuck[0])
        for ring in case.rings
        if ring.queue == RESPONSE and engine.pid in ring.readers and 0 in ring.stuck
    ]


def path_to(case: Case, root: int) -> tuple[int, ...]:
    """Members from the engine (or the server itself) down to `root`, through the waits where they lead there."""
    member = case.scene.members[root]
    if member.role not in ("Worker", "RayWorker"):
        return (root,)
    engine = member.engine_pid
    if engine is None or engine not in case.scene.members:
        return (root,)
    waits = waits_of(case)
    # One peer that waits in a collective for the root shows the mechanism better than the bare edge engine -> root.
    through = [w.waiter for w in waits if w.on == root and w.layer == 4]
    middle = [pid for pid in through if case.acts[pid].kind == WAITING or case.acts[pid].state == "collective"]
    return (engine, middle[0], root) if middle else (engine, root)


def sinks(case: Case, start: int) -> tuple[int, ...]:
    """Where the waits from `start` lead: members that wait for nobody, in order of distance; empty for a pure cycle."""
    edges: dict[int, list[int]] = {}
    for wait in waits_of(case):
        edges.setdefault(wait.waiter, []).append(wait.on)
    seen, queue, found = {start}, deque([start]), []
    while queue:
        pid = queue.popleft()
        following = [] if case.halted(pid) else edges.get(pid, [])
        if not following:
            found.append(pid)
        for on in following:
            if on not in seen:
                seen.add(on)
                queue.append(on)
    return tuple(found)

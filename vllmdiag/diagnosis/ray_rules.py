"""Workers that run below Ray: they are no children of the engine, and that they are gone is seen by Ray alone."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.snapshot import Snapshot

from . import write
from .scene import Scene


def ray_findings(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """Every worker of the engine is dead, as Ray counts its actors.

    Ray remembers dead actors of earlier runs: while one worker lives, or none has been placed yet, they tell nothing.

    Args:
        snapshot: the evidence.
        scene: of the instance; None where no process of it was given.
    """
    ray = snapshot.ray
    if ray is None or not ray.workers_dead or ray.workers_alive:
        return
    if any(event.kind == "ray_placement" for log in snapshot.logs if not log.served for event in log.phases):
        return
    if scene is not None and any(scene.alive(w) for w in scene.workers):
        return
    engine = scene.engines[0] if scene is not None and scene.engines else None
    who = scene.subject(engine.pid) if scene is not None and engine else Subject(role="EngineCore", label="EngineCore")
    answers = [p for p in snapshot.http if p.path == "/health" and p.status is not None]
    yield write.finding(
        "engine-dead",
        who,
        f"the engine has lost all of its workers: {ray.workers_dead} actors of Ray are dead, and none is alive",
        evidence=[
            f"ray list actors: {ray.workers_dead} workers DEAD, 0 alive",
            *(f"/health {p.status}: it does not ask the workers" for p in answers[:1]),
        ],
        chain=(Link(subject=who, doing="has no worker left"),),
        words={"target": str(scene.instance.roots[0])} if scene is not None else {},
    )

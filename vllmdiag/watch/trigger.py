"""When to look closely and when to capture: samples in, decisions out. Pure; the clock comes in with the samples.

Watching is cheap (flags and states), judging is not, so the trigger asks for a look only where something is odd, and
lets the look decide: what it calls healthy is no incident. One incident is captured once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from vllmdiag.diagnosis.case import Case
from vllmdiag.diagnosis.scene import scene_of
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.loglines import find

_HALTED = ("T", "t")
_DEAD = ("", "Z", "X")
_CORE = ("APIServer", "EngineCore", "Worker", "RayWorker", "DPCoordinator", "Launcher", "Driver")

Reason = Literal["died", "long-wait", "stall", "still"]
"""Why to look. ``died`` and ``long-wait`` are captured whatever the look says; ``stall`` (something waits) is urgent;
``still`` (nothing moves, nothing is known to wait) can wait its turn, and is captured only where it is a fault."""


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What one round has shown."""

    t: float
    """Seconds since the watching of this server began."""
    moved: Mapping[int, bool]
    """EngineCore pid -> whether something of it moved; key 0 for a server in which no engine is seen."""
    waiting: tuple[str, ...] = ()
    """What waits or stands, in words: unread slots, stopped processes."""
    gone: tuple[int, ...] = ()
    """Members that have ended within the round."""
    long_wait: bool = False
    """The server has logged its long-wait line."""


def signs_of(snapshot: Snapshot, t: float) -> Signs:
    """Read the signs off a round: a snapshot with rings, states and the log lines that came."""
    scene = scene_of(snapshot)
    long_wait = any((known := find(line.text)) and known.kind.id == "long_wait" for line in snapshot.log_lines)
    if scene is None:
        return Signs(t=t, moved={0: False}, long_wait=long_wait)
    case = Case(scene)
    moved: dict[int, bool] = {e.pid: False for e in scene.engines} or {0: False}
    waiting = []
    for ring in case.rings:
        owner = next((pid for pid in (ring.writer, *ring.readers) if pid in moved), None)
        owner = owner if owner is not None else next((e.pid for e in scene.engines), 0)
        moved[owner] = moved[owner] or (ring.sampled and ring.moved > 0)
        if ring.stuck:
            waiting.append(f"{len(ring.stuck)} readers of a {ring.queue} ring have not read")
    members = [m for m in scene.instance.members if m.role in _CORE]
    waiting += [f"{m.label} is stopped" for m in members if scene.processes[m.pid].state in _HALTED]
    dead = [p for m in members if (p := scene.processes[m.pid]).state in _DEAD]
    return Signs(
        t=t,
        moved=moved,
        waiting=tuple(waiting),
        gone=tuple(p.pid for p in dead if p.samples and p.samples[0].state not in _DEAD),
        long_wait=long_wait,
    )


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, from its capture until work goes on."""

    reason: Reason
    cause: str


class Trigger:
    """Remembers what moved when, and which incident is open.

    Args:
        stall_s: so long nothing may move.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_at: dict[int, float] = {}
        self._waiting_since: float | None = None
        self._told_long_wait = False
        self.incident: Incident | None = None

    def feed(self, signs: Signs) -> Reason | None:
        """Take in a round; the reason to look now, or None."""
        self._moved_at = {
            engine: signs.t if moved else self._moved_at.get(engine, signs.t) for engine, moved in signs.moved.items()
        }
        if not signs.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = signs.t
        if any(signs.moved.values()):
            self._told_long_wait = False
        if signs.gone:
            return "died"
        if signs.long_wait and not self._told_long_wait:
            self._told_long_wait = True
            return "long-wait"
        if self.still_s(signs.t) < self._stall_s:
            return None
        waited = signs.t - self._waiting_since if self._waiting_since is not None else 0.0
        return "stall" if waited >= self._stall_s and self.incident is None else "still"

    def still_s(self, t: float) -> float:
        """For how long the engine that stands longest has not moved."""
        return max((t - at for at in self._moved_at.values()), default=0.0)

    def recovered(self, signs: Signs) -> bool:
        """Whether the incident that was open is over because every engine moves again."""
        if self.incident is None or signs.waiting or not all(signs.moved.values()):
            return False
        self.incident = None
        return True

    def judged(self, reason: Reason, diagnosis: Diagnosis) -> tuple[bool, bool]:
        """Take in the result of a look.

        Returns:
            (to capture, recovered): whether this is a new incident; whether one that was open is over.
        """
        verdict = diagnosis.verdict
        fault = verdict.status == "critical"
        if reason in ("died", "long-wait"):
            new = self.incident is None or self.incident.reason != reason
        else:
            new = fault and self.incident is None
        if new:
            self.incident = Incident(reason=reason, cause=verdict.cause)
            return True, False
        if self.incident is not None and verdict.status == "ok":
            self.incident = None
            return False, True
        return False, False

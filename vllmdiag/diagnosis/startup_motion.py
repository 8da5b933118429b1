"""Does a process of a start-up advance? By its CPU, its reads, its stack, and the children it has work for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllmdiag.model.process import Process, ProcessSample
from vllmdiag.vllm.instances import Member

from .activity import DEAD, IDLE, STOPPED, WAITING, Activity
from .scene import Scene

_CPU = 0.05
"""Cores below which a process does not compute."""
_STARVED = 0.3
"""Share of the window in the queue for a processor from which on a standstill proves nothing."""
_SLOW_READ_S = 10.0
"""A process that has been in D for less than this may merely wait for a slow disk."""
_HELPER_CPU_S = 0.02
_RCHAR_BYTES = 1 << 16
"""Fewer bytes than this come from looks at pipes and at /proc, not from loading."""


def motion_of(scene: Scene, acts: Mapping[int, Activity], window_s: float) -> dict[int, tuple[str, ...]]:
    """What shows that each member advances, in words; empty for one that does not, and for helpers."""
    return {
        m.pid: () if m.role in ("Helper", "ResourceTracker") else tuple(_words(scene, acts, m, window_s))
        for m in scene.instance.members
    }


def _words(scene: Scene, acts: Mapping[int, Activity], member: Member, window_s: float) -> Iterator[str]:
    """What shows that a member advances. To spin in a wait is no motion, whatever CPU it takes."""
    process = scene.processes[member.pid]
    act = acts[member.pid]
    window = window_s or 1.0
    if act.kind in (DEAD, STOPPED):
        return
    # The start-up waits are known by outer frames, inside which there is real work; the others are spun in.
    waits = act.kind in (WAITING, IDLE) and act.state not in ("wait_start", "download")
    cpu = process.cpu_s / window - (act.cpu if waits else 0.0)
    if cpu >= _CPU:
        yield f"{cpu:.1f} cores busy"
    read = _grew(process, "read_bytes") or 0
    if read or (_grew(process, "rchar") or 0) > _RCHAR_BYTES:
        yield f"{max(read, _grew(process, 'rchar') or 0) / window / 1e6:.1f} MB/s read"
    elif _grew(process, "majflt"):
        yield "pages come in"
    if not waits and act.main is not None and len(act.main.stacks) > 1 and not act.main.still:
        yield "its stack changes"
    if act.starved >= _STARVED or (not waits and cpu < _CPU and _runnable(process)):
        yield "runnable, and short of CPU"
    if _waits_for_storage(process):
        yield f"waits for storage since {process.last_ran_s:.0f} s"
    if process.age_s is not None and process.age_s < window:
        yield "just started"
    yield from _helpers_at_work(scene, member, window)


def _waits_for_storage(process: Process) -> bool:
    """In D, and not for long: one read of a slow disk may take longer than a window."""
    in_d = bool(process.samples) and process.samples[-1].state == "D"
    return in_d and process.last_ran_s is not None and process.last_ran_s < _SLOW_READ_S


def _runnable(process: Process) -> bool:
    """Runnable in most looks: it would go on if the machine let it. One that polls is seen so now and then."""
    looks = [s.state for s in process.samples if s.state]
    return len(looks) >= 2 and sum(state == "R" for state in looks) * 2 > len(looks)


def _grew(process: Process, field: str) -> int | None:
    seen = [s for s in process.samples if s.state]
    if len(seen) < 2:
        return None
    first, last = _value(seen[0], field), _value(seen[-1], field)
    return last - first if first is not None and last is not None and last > first else 0


def _value(sample: ProcessSample, field: str) -> int | None:
    value = getattr(sample, field)
    return int(value) if value is not None else None


def _helpers_at_work(scene: Scene, member: Member, window_s: float) -> Iterator[str]:
    """Children that are no part of vLLM (a compiler, an inspection of the model) and that compute or were just born."""
    for pid in helpers_of(scene, member.pid):
        process = scene.processes[pid]
        young = process.age_s is not None and process.age_s < window_s
        if process.cpu_s >= _HELPER_CPU_S or young or process.state in ("R", "D"):
            yield f"its child {process.comm} (pid {pid}) works"
            return


def helpers_of(scene: Scene, pid: int) -> list[int]:
    """Helpers below a member, at any depth."""
    below: list[int] = []
    parents = {pid}
    for m in scene.instance.members:  # parents come before their children
        if m.role == "Helper" and m.parent_pid in parents:
            parents.add(m.pid)
            below.append(m.pid)
    return below

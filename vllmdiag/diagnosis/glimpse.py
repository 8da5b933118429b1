"""What pasted evidence cannot prove: one look tells no standstill from a step, and idle stacks alone tell no idleness.

A live look always lasts for a window and asks for counters; what people paste often is one dump of stacks. Blind is
never healthy, and a moment of a server at work is no fault.
"""

from __future__ import annotations

from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.signatures import match

from .activity import ThreadView
from .case import Case
from .devices import seems_spinning
from .motion import counters, deferred, gauge, unanswered
from .scheduler_rules import has_connector
from .thread_rules import at_rest

AGAIN = "one look only: whether anything moves is not known; look twice, 30 s apart"
_HELD = 0.01
"""Share of the KV cache that an engine without a request does not hold."""
_STANDS = (
    "long_wait",
    "rpc_timeout",
    "waiting_engines",
    "waiting_engines_0_8",
    "nccl_watchdog",
    "cancelled",
    "ray_channel_timeout",
)
"""Lines of a log that say that something has not moved for long."""


def glimpse(case: Case) -> bool:
    """The evidence shows one moment of the instance, and nothing in it says that it lasted."""
    snapshot = case.scene.snapshot
    if not snapshot.pasted or snapshot.ras or snapshot.flight_records:
        return False
    if any(act.main is not None and act.main.dumps > 1 for act in case.acts.values()):
        return False
    if counters(snapshot) or unanswered(case.scene):
        return False
    if any(seems_spinning(device) for device in snapshot.accelerators):
        return False
    lines = (find(line.text, case.scene.version) for line in snapshot.log_lines)
    return not any(line is not None and line.kind.id in _STANDS for line in lines)


def hole(case: Case, layer: int) -> str:
    """What pasted evidence lacks of a layer to call it sound; empty where nothing, or for a live look."""
    scene = case.scene
    if not scene.snapshot.pasted:
        return ""
    working = [m for m in scene.instance.members if m.role not in ("Helper", "ResourceTracker")]
    if layer == 1:
        unknown = [m.label for m in working if scene.processes[m.pid].state in ("", "?")]
        return f"states of {', '.join(unknown[:8])} are not in the evidence" if unknown else ""
    if layer == 2 and not case.starting:
        return "" if scene.listeners else "no socket table in the evidence"
    if layer == 3:
        return "" if case.rings or case.starting else "no ring in the evidence"
    if layer == 4 and not scene.workers:
        return "no worker in the evidence"
    if layer == 5:
        return "" if scene.probes else "no request in the evidence"
    return ""


def _compiles(view: ThreadView) -> bool:
    """It compiles a grammar: a request is being prepared that no counter may know any more."""
    return any(m.signature.id == "grammar.compile" for m in match(view.frames, "EngineCore"))


def not_proven_busy(case: Case) -> str:
    """Why pasted stacks of somebody at work do not mean that all is well; empty where they may."""
    members = (*case.scene.engines, *case.scene.workers)
    held = [m.label for m in members if case.acts[m.pid].still and case.acts[m.pid].state == "collective"]
    if glimpse(case):
        return AGAIN
    if held and case.scene.snapshot.pasted:
        return f"{', '.join(held)}: in a collective in every look, and who has not come to it is not in the evidence"
    return ""


def not_proven_idle(case: Case) -> str:
    """Why idle stacks do not mean that nothing is outstanding: neither rings nor counters say so; empty where they do.

    A live look without the rights to read rings is as blind there as pasted stacks are.
    """
    snapshot = case.scene.snapshot
    if not snapshot.pasted and (not case.scene.workers or any(ring.sampled for ring in case.rings)):
        return ""
    if lost := unanswered(case.scene):
        return lost[0]
    for engine in case.scene.engines:
        act = case.acts[engine.pid]
        stuck = [t for t in act.threads if "process_" in t.name and "_socket" in t.name and not at_rest(t.frames)]
        stuck += [t for t in act.threads if t.stacks and t.stacks[-1].active and _compiles(t)]
        usage = gauge(case.scene, engine, "kv_cache_usage_perc") or 0.0
        if usage > _HELD and has_connector(case, act):
            return f"{usage:.0%} of the KV cache of {engine.label} is held, with a KV connector, by no request counted"
        if stuck:
            return f"thread {stuck[0].name} of {engine.label} is in {stuck[0].frames[0].name}"
    answered = any(p.method == "POST" and p.status is not None and p.status < 300 for p in snapshot.http)
    names = ("num_requests_running", "num_requests_waiting")
    counts = [gauge(case.scene, engine, name) for engine in case.scene.engines for name in names]
    counts += [value for engine in case.scene.engines if (value := deferred(case.scene, engine))]
    if answered or (counts and all(count == 0 for count in counts)):
        return ""
    if any(counts):
        return "requests are unfinished by /metrics"
    if not snapshot.pasted:
        return "whether something is unread or outstanding could not be seen: run it as root, or with /metrics"
    return "whether requests are outstanding is not in the evidence: add /metrics, or one request of one token"

"""A live node held against its plan, number by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllmdiag.model.plan import Compared, NodePlan, Plan, PlanCheck
from vllmdiag.model.view import InstanceView
from vllmdiag.vllm.endpoints import is_ipc_path
from vllmdiag.vllm.serve_options import ServeOptions

_FDS = 0.35
"""Share by which descriptors may pass the plan: connections of clients come on top."""
_THREADS = 0.5
"""Threads go with the number of processors."""
_WORDS = {"broadcast": "broadcast ring", "response": "response ring", "group": "group ring"}


def kind_of(plan: Plan, options: ServeOptions | None) -> NodePlan:
    """Which node of the plan a live one is, by its arguments."""
    if options is not None and options.headless:
        names = ("follower", "leader", "headless") if options.nnodes > 1 else ("headless", "leader", "follower")
        if options.nnodes > 1 and options.node_rank % plan.nodes_per_engine == 0:
            names = ("leader", "follower", "headless")
        return next((k for name in names for k in plan.kinds if k.kind == name), plan.kinds[-1])
    return plan.kinds[0]


def check(plan: Plan, kind: NodePlan, live: InstanceView) -> PlanCheck:
    """Compare.

    Args:
        plan: the plan.
        kind: the kind of node that `live` should be.
        live: one node of one job, seen with its sockets and segments.
    """
    compared = (*_processes(kind, live), *_rings(kind, live), *_sockets(kind, live), *_appetites(kind, live))
    return PlanCheck(topology=plan.topology, kind=kind.kind, agrees=all(c.agrees for c in compared), compared=compared)


def _equal(what: str, planned: int, seen: int | None) -> Compared:
    return Compared(what=what, planned=planned, seen=seen, agrees=seen in (None, planned))


def _at_most(what: str, planned: int, seen: int | None, share: float) -> Compared:
    agrees = seen is None or seen <= planned * (1 + share)
    return Compared(what=what, planned=planned, seen=seen, tolerance=share, agrees=agrees)


def _role(role: str) -> str:
    return "Worker" if role == "RayWorker" else role


def _processes(kind: NodePlan, live: InstanceView) -> Iterator[Compared]:
    seen = Counter(_role(m.role) for m in live.members if m.pid is not None)
    planned = {r.role: r.processes for r in kind.roles}
    for role in dict.fromkeys([*planned, *(name for name in seen if name not in ("Helper", "ResourceTracker"))]):
        if role != "ResourceTracker":
            yield _equal(f"{role} processes", planned.get(role, 0), seen.get(role, 0))


def _rings(kind: NodePlan, live: InstanceView) -> Iterator[Compared]:
    blind = bool(live.missing) and not live.segments
    for queue, words in _WORDS.items():
        planned = [r for r in kind.rings if r.queue == queue]
        seen = [s.size for s in live.segments if s.kind == words]
        if planned or seen:
            count, size = sum(r.count for r in planned), sum(r.count * r.file_bytes for r in planned)
            yield _equal(f"{words}s", count, None if blind else len(seen))
            yield _equal(f"bytes of {words}s", size, None if blind else sum(seen))


def _sockets(kind: NodePlan, live: InstanceView) -> Iterator[Compared]:
    paths = [e for e in live.endpoints if e.address.startswith("ipc://") and is_ipc_path(e.address)]
    blind = not live.endpoints
    yield _equal("unix sockets that listen", kind.unix_paths, None if blind else len(paths))
    connections = sum(s.connections for s in kind.sockets if s.transport == "ipc")
    seen = sum(len(e.connections) for e in paths)
    yield _equal("connections to them", connections, None if blind else seen)


def _appetites(kind: NodePlan, live: InstanceView) -> Iterator[Compared]:
    """What they take of the kernel's tables. Where devices add to it the plan knows no upper bound."""
    for role in kind.roles:
        mine = [m for m in live.members if _role(m.role) == role.role]
        if role.fds is None or role.threads is None or role.at_least:
            continue
        fds = max((m.fds for m in mine if m.fds is not None), default=None)
        threads = max((m.threads for m in mine if m.threads is not None), default=None)
        yield _at_most(f"descriptors of {role.role}", role.fds, fds, _FDS)
        yield _at_most(f"threads of {role.role}", role.threads, threads, _THREADS)

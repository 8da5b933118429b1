"""What breaks first: every limit, and the smallest size at which the plan passes it while one number grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from vllmdiag.model.errors import UsageError
from vllmdiag.model.plan import Break, NodePlan, Topology
from vllmdiag.vllm.capacity import capacity

from .counts import kernel_ports, kinds_of
from .topology import Placement, settle

_MOST = 1 << 17
"""Sizes beyond this are not looked at."""

EFFECTS = {
    "shm file": "vLLM >= 0.29 refuses to start, older ones die with SIGBUS when the ring is first used",
    "shm sum": "starts, because files are sparse; the first write past the limit kills the writer with SIGBUS",
    "nofile": "accept fails: clients are reset, or ZMQ aborts the process",
    "pids": "a thread cannot be started: the process that wanted it dies",
    "sun_path": "the bind fails: the path of a unix socket is too long",
    "ports": "a listener finds no free port: the process that wanted it dies in its start-up",
    "backlog": "engines that connect all at once are put off and try again: a slow start, no fault",
    "identities": "two engines have one identity: answers go astray",
}


@dataclass(frozen=True)
class _Need:
    """How much of one limit a placement takes."""

    limit: str
    """Name in the table of limits."""
    effect: str
    where: str
    of: Callable[[Placement, tuple[NodePlan, ...]], int]


def _role_fds(role: str) -> Callable[[Placement, tuple[NodePlan, ...]], int]:
    return lambda _, nodes: max((r.fds or 0 for n in nodes for r in n.roles if r.role == role), default=0)


def _connects(placed: Placement, _: object) -> int:
    return placed.topology.dp if placed.nodes_per_job > placed.nodes_per_engine else 0


_NEEDS = (
    _Need("shm", "shm file", "the largest file of /dev/shm", lambda _, nodes: max(n.shm_largest for n in nodes)),
    _Need("shm", "shm sum", "all files of /dev/shm of a node", lambda _, nodes: max(n.shm_bytes for n in nodes)),
    *(
        _Need("nofile", "nofile", role, _role_fds(role))
        for role in ("APIServer", "EngineCore", "Worker", "DPCoordinator")
    ),
    _Need("pids", "pids", "threads of a node", lambda _, nodes: max(n.threads for n in nodes)),
    _Need(
        "sun_path",
        "sun_path",
        "the path of a ZMQ socket",
        lambda placed, _: len(placed.topology.ipc_dir) + 1 + capacity().ipc_name,
    ),
    _Need("ports", "ports", "TCP listeners of a node", lambda _, nodes: max(kernel_ports(n) for n in nodes)),
    _Need("backlog", "backlog", "ZMQ listeners of the head", _connects),
    _Need("identities", "identities", "engines of a job", lambda placed, _: placed.topology.dp),
)


def _engines(top: Topology, size: int) -> Topology:
    return msgspec.structs.replace(top, dp=size, api_servers=None, nodes=_MOST * 1024, dp_local=None)


def _more_on_a_node(top: Topology, size: int) -> Topology:
    return msgspec.structs.replace(
        top, dp=size, dp_local=size, nodes=1, api_servers=None, gpus_per_node=size * top.world
    )


def _ranks(top: Topology, size: int) -> Topology:
    return msgspec.structs.replace(top, tp=size, nodes=_MOST * 1024, executor="ray" if top.executor == "ray" else "mp")


def _servers(top: Topology, size: int) -> Topology:
    return msgspec.structs.replace(top, api_servers=size)


_GROWTH: Mapping[str, tuple[Callable[[Topology], int], Callable[[Topology, int], Topology]]] = {
    "engines over more nodes (dp)": (lambda t: t.dp, _engines),
    "engines on one node (dp)": (lambda t: t.dp_local or t.dp, _more_on_a_node),
    "ranks of an engine (tp)": (lambda t: t.tp, _ranks),
    "API servers": (lambda t: t.api_servers or 1, _servers),
}


def breaks(placed: Placement, limits: Mapping[str, int | None]) -> tuple[Break, ...]:
    """Every limit that the plan can meet, the one it meets first in front.

    Args:
        placed: the settled topology.
        limits: name -> value; None is unlimited.
    """
    held = [(need, value) for need in _NEEDS if (value := limits.get(need.limit)) is not None]
    found = [row for need, value in held for row in _first(placed, need, value)]
    return tuple(sorted(found, key=lambda b: (b.need <= b.value, (b.at or _MOST) / b.now)))


def _first(placed: Placement, need: _Need, value: int) -> Iterator[Break]:
    """The growth that meets this limit soonest; none where nothing does."""
    top = placed.topology
    now = need.of(placed, kinds_of(placed))
    grown = [
        Break(
            limit=need.limit,
            where=need.where,
            need=now,
            value=value,
            grows=name,
            now=size(top),
            at=_smallest(top, size(top), change, need, value),
            effect=EFFECTS[need.effect],
        )
        for name, (size, change) in _GROWTH.items()
    ]
    if now > value:
        yield msgspec.structs.replace(grown[0], grows="as it is", now=1, at=1)
        return
    meeting = [b for b in grown if b.at is not None]
    if meeting:
        yield min(meeting, key=lambda b: (b.at or 0) / b.now)


def _smallest(
    top: Topology, now: int, change: Callable[[Topology, int], Topology], need: _Need, value: int
) -> int | None:
    """Smallest size past the limit, by doubling and halving; sizes that cannot be placed are passed over."""

    def passes(size: int) -> bool | None:
        for valid in (size, -(-size // top.gpus_per_node) * top.gpus_per_node):
            try:
                placed = settle(change(top, valid))
            except UsageError:
                continue
            return need.of(placed, kinds_of(placed)) > value
        return None

    high = max(1, now)
    while not passes(high):
        if high >= _MOST:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return high

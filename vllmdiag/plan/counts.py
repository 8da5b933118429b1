"""What stands on each kind of node: processes, rings, sockets, ports, and their sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllmdiag.model.plan import NodePlan, PortPlan, RingPlan, RolePlan, SocketPlan
from vllmdiag.vllm.capacity import amount, capacity
from vllmdiag.vllm.endpoints import endpoints
from vllmdiag.vllm.layouts import Queue, shape

from .topology import Placement

_READY = ("engine input", "engine output")


@dataclass(frozen=True)
class _Kind:
    """One kind of node of a job."""

    name: str
    nodes: int
    """Over all jobs."""
    engines: int
    """EngineCores that run there."""
    ranks: int
    head: bool = False
    first_rank: bool = True
    """The ranks begin with rank 0 of an engine."""


def kinds_of(placed: Placement) -> tuple[NodePlan, ...]:
    """One plan for each kind of node, the head first."""
    return tuple(_node(placed, kind) for kind in _kinds(placed))


def _kinds(placed: Placement) -> Iterator[_Kind]:
    top, jobs = placed.topology, placed.jobs
    if placed.nodes_per_job == 1:
        yield _Kind("node", jobs, top.dp, top.dp * top.world, head=True)
        return
    if placed.nodes_per_engine > 1:
        local = placed.local_world
        yield _Kind("head", jobs, 1, local, head=True)
        if top.dp > 1:
            yield _Kind("leader", jobs * (top.dp - 1), 1, local)
        yield _Kind("follower", jobs * top.dp * (placed.nodes_per_engine - 1), 0, local, first_rank=False)
        return
    full, rest = divmod(top.dp, placed.engines_per_node)
    yield _Kind("head", jobs, placed.engines_per_node, placed.engines_per_node * top.world, head=True)
    if full > 1:
        yield _Kind("headless", jobs * (full - 1), placed.engines_per_node, placed.engines_per_node * top.world)
    if rest:
        yield _Kind("headless", jobs, rest, rest * top.world)


def _node(placed: Placement, kind: _Kind) -> NodePlan:
    rings = tuple(_rings(placed, kind))
    sockets = tuple(_sockets(placed, kind, rings))
    roles = tuple(_roles(placed, kind, rings))
    arenas = 0
    if placed.topology.arena and placed.nodes_per_engine == 1 and any(r.queue == "broadcast" for r in rings):
        arenas = kind.engines * capacity().arena_bytes.size(placed.local_world)
    files = [*(r.file_bytes for r in rings), arenas // max(1, kind.engines)]
    return NodePlan(
        kind=kind.name,
        nodes=kind.nodes,
        engines=kind.engines,
        ranks=kind.ranks,
        roles=roles,
        rings=rings,
        sockets=sockets,
        ports=tuple(_ports(placed, kind, sockets)),
        other_shm_bytes=arenas,
        shm_bytes=sum(r.count * r.file_bytes for r in rings) + arenas,
        shm_largest=max(files, default=0),
        unix_paths=sum(s.listeners for s in sockets if s.transport == "ipc"),
        processes=sum(r.processes for r in roles),
        fds=sum(r.processes * (r.fds or 0) for r in roles),
        threads=sum(r.processes * (r.threads or 0) for r in roles),
    )


def _roles(placed: Placement, kind: _Kind, rings: tuple[RingPlan, ...]) -> Iterator[RolePlan]:
    top = placed.topology
    coordinated = int(top.dp > 1)
    local = placed.local_world if kind.first_rank else 0
    counts = {
        "engines": top.dp,
        "servers": placed.servers,
        "coordinators": coordinated,
        "workers": local if top.executor != "uni" else 0,
        "remote_workers": top.world - local if kind.engines else 0,
        "tp_peers": top.tp - 1,
        "pp_peers": top.pp - 1,
        "group_rings": sum(r.queue == "group" for r in rings),
    }

    def role(name: str, processes: int) -> Iterator[RolePlan]:
        if processes:
            appetite = capacity().appetite(name)
            yield RolePlan(
                role=name,
                processes=processes,
                fds=amount(appetite.fds, counts),
                threads=amount(appetite.threads, counts),
                at_least=appetite.at_least,
            )

    # On other nodes Ray starts the workers itself.
    started_here = kind.head or top.executor != "ray"
    yield from role("Launcher", int(placed.launcher if kind.head else started_here))
    yield from role("APIServer", placed.servers if kind.head else 0)
    yield from role("DPCoordinator", coordinated if kind.head else 0)
    yield from role("EngineCore", kind.engines)
    yield from role("Worker", kind.ranks if top.executor != "uni" else 0)
    yield from role("ResourceTracker", int(started_here))


def _rings(placed: Placement, kind: _Kind) -> Iterator[RingPlan]:
    top = placed.topology

    def ring(queue: Queue, count: int, readers: int, writer: str, remote: int = 0) -> Iterator[RingPlan]:
        if count and readers:
            layout = shape(queue, readers, top.version, top.chunk_mib)
            yield RingPlan(
                queue="response" if queue == "remote_response" else queue,
                count=count,
                chunks=layout.chunks,
                chunk_bytes=layout.chunk_bytes,
                readers=readers,
                remote_readers=remote,
                writer=writer,
                source=layout.source,
                file_bytes=layout.geometry.size,
            )

    spans = placed.nodes_per_engine > 1
    if top.executor == "mp":
        local = placed.local_world
        yield from ring("broadcast", kind.engines, local, "EngineCore", top.world - local)
        yield from ring("remote_response" if spans else "response", kind.engines * local, 1, "Worker")
    # One group of tp ranks after another; its ring is on the node of its first rank, and only neighbours read it there.
    if top.tp > 1 and top.tp <= placed.local_world:
        yield from ring("group", kind.ranks // top.tp, top.tp - 1, "first rank of each group")
    elif top.tp > 1 and kind.engines:
        yield from ring("group", kind.engines, placed.local_world - 1, "first rank", top.tp - placed.local_world)


def _sockets(placed: Placement, kind: _Kind, rings: tuple[RingPlan, ...]) -> Iterator[SocketPlan]:
    top = placed.topology
    spread = placed.nodes_per_job > placed.nodes_per_engine
    readers = {r.queue: (r.count, r.readers) for r in rings}
    remote = top.world - placed.local_world if top.executor == "mp" else 0
    counts: dict[str, tuple[int, int, bool]] = {}
    if kind.head:
        counts |= dict.fromkeys(_READY, (placed.servers, placed.servers * top.dp, spread))
        if top.dp > 1:
            counts["coordinator front publish"] = (1, placed.servers, False)
            counts["coordinator back output"] = counts["coordinator back publish"] = (1, top.dp, spread)
    for queue, (n, each) in readers.items():
        for half in ("overflow", "notify"):
            counts[f"{queue} {half}"] = (n, n * each, False)
    if remote and kind.engines:
        counts["remote broadcast"] = (kind.engines, kind.engines * remote, True)
    if remote and not kind.first_rank:
        counts["remote response"] = (kind.ranks, kind.ranks, True)
    for endpoint in endpoints(top.version):
        if endpoint.phase == "serving" and endpoint.name in counts:
            listeners, connections, tcp = counts[endpoint.name]
            yield SocketPlan(
                name=endpoint.name,
                binds=endpoint.binds,
                connects=endpoint.connects,
                transport="tcp" if tcp else "ipc",
                listeners=listeners,
                connections=connections,
                source=endpoint.source,
            )


def _ports(placed: Placement, kind: _Kind, sockets: tuple[SocketPlan, ...]) -> Iterator[PortPlan]:
    top = placed.topology
    if kind.head:
        yield PortPlan(purpose="HTTP", port=str(top.port))
    if kind.head and top.master_port:
        yield PortPlan(purpose="master (TCPStore)", port=str(top.master_port))
    if kind.head and top.rpc_port:
        yield PortPlan(purpose="data-parallel RPC, while starting", port=str(top.rpc_port))
    zmq = sum(s.listeners for s in sockets if s.transport == "tcp")
    if zmq:
        yield PortPlan(purpose="ZMQ to other nodes", port="kernel", count=zmq)
    if top.world > 1 or top.ep:
        # At the least one a rank: every process group makes its own (13 a worker were recorded on CPU).
        yield PortPlan(purpose="process groups, one or more a rank", port="kernel", count=kind.ranks)


def kernel_ports(node: NodePlan) -> int:
    """Ports of the kernel's range that listeners of one node take, at the least."""
    return sum(p.count for p in node.ports if p.port == "kernel")

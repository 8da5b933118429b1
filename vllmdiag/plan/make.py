"""The plan as a whole: placed, counted, held against limits, with the traffic and where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllmdiag.model.errors import UsageError
from vllmdiag.model.plan import Flow, LimitPlan, Plan, Topology
from vllmdiag.vllm.capacity import capacity

from .counts import kinds_of
from .growth import breaks
from .topology import Placement, settle


def plan(asked: Topology, limits: Mapping[str, tuple[int | None, str]] | None = None) -> Plan:
    """Plan a topology.

    Args:
        asked: what is to be started.
        limits: name -> (value, where it comes from), instead of the defaults of the same name.

    Raises:
        UsageError: no server can be started like this, or a limit of that name is not known.
    """
    placed = settle(asked)
    held = _limits(limits or {})
    kinds = kinds_of(placed)
    rings = [ring.source for kind in kinds for ring in kind.rings]
    roles = [capacity().appetite(role.role).source for kind in kinds for role in kind.roles]
    return Plan(
        topology=placed.topology,
        jobs=placed.jobs,
        nodes_per_job=placed.nodes_per_job,
        nodes_per_engine=placed.nodes_per_engine,
        engines_per_node=placed.engines_per_node,
        idle_gpus=placed.idle_gpus,
        kinds=kinds,
        flows=tuple(_flows(placed)),
        limits=held,
        breaks=breaks(placed, {limit.name: limit.value for limit in held}),
        notes=tuple(_notes(placed)),
        sources=tuple(dict.fromkeys([*rings, *roles])),
    )


def _limits(given: Mapping[str, tuple[int | None, str]]) -> tuple[LimitPlan, ...]:
    known = {d.name: d for d in capacity().limits}
    for name in given:
        if name not in known:
            raise UsageError(
                f"there is no limit {name}", why=f"there are {', '.join(known)}", next="--limit nofile=65536"
            )
    return tuple(
        LimitPlan(name=name, value=given[name][0], source=given[name][1])
        if name in given
        else LimitPlan(name=name, value=default.value, source=default.source)
        for name, default in known.items()
    )


def _flows(placed: Placement) -> Iterator[Flow]:
    top = placed.topology
    spread = placed.nodes_per_job > placed.nodes_per_engine
    spans = placed.nodes_per_engine > 1
    yield Flow(what="requests and answers", between="client, API server", scope="network", over="TCP, HTTP")
    yield Flow(
        what="requests, outputs",
        between="API server, EngineCore",
        scope="both" if spread else "node",
        over="ZMQ over TCP" if spread else "ZMQ over unix sockets",
    )
    if top.executor == "mp":
        far = top.world - placed.local_world
        over = f"shared memory; TCP to {far} remote ranks of each engine, one copy for each" if far else "shared memory"
        yield Flow(
            what="commands of a step, replies",
            between="EngineCore, workers",
            scope="both" if spans else "node",
            over=over,
        )
    elif top.executor == "ray":
        yield Flow(what="commands of a step, replies", between="EngineCore, workers", scope="both", over="Ray channels")
    if top.tp > 1:
        crosses = top.tp > placed.local_world
        yield Flow(
            what="all-reduce and all-gather of every layer",
            between=f"{top.tp} tensor-parallel ranks",
            scope="network" if crosses else "node",
            over="NCCL over the network" if crosses else "NCCL or custom all-reduce over NVLink, PCIe or shared memory",
        )
    if top.pp > 1:
        stages_here = placed.local_world // top.tp if top.tp <= placed.local_world else 0
        yield Flow(
            what="activations",
            between=f"{top.pp} pipeline stages",
            scope="node" if stages_here >= top.pp else "both" if stages_here > 1 else "network",
            over="NCCL send and receive",
        )
    if top.ep and top.dp * top.tp > 1:
        yield Flow(
            what="tokens to their experts and back",
            between=f"{top.dp * top.tp} expert-parallel ranks",
            scope="both" if placed.nodes_per_job > 1 else "node",
            over="all-to-all or all-gather, every MoE layer",
        )
    if top.dp > 1:
        yield Flow(
            what="load figures, waves",
            between="DPCoordinator, API servers, EngineCores",
            scope="both" if spread else "node",
            over="ZMQ",
        )


def _notes(placed: Placement) -> Iterator[str]:
    top = placed.topology
    used = placed.jobs * placed.nodes_per_job
    if used < top.nodes:
        yield f"{top.nodes - used} of {top.nodes} nodes are left over: a server takes {placed.nodes_per_job}"
    busy = placed.engines_per_node * placed.local_world
    if placed.idle_gpus and busy < top.gpus_per_node:
        yield f"{top.gpus_per_node - busy} of {top.gpus_per_node} GPUs of a node have no rank"
    if top.tp > placed.local_world:
        here = f"{placed.local_world} of {top.tp} ranks on one"
        yield f"tensor parallelism crosses nodes ({here}): every layer waits for the network"
    if top.executor == "uni":
        yield "one rank: on GPUs the engine runs the model itself, no worker and no ring (on CPU: --executor mp)"
    if top.executor == "ray":
        yield "Ray's own processes, object store and ports are not counted"
    if placed.jobs > 1:
        yield f"{placed.jobs} servers that know nothing of each other; a balancer has to stand before them"

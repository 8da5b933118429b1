"""From what was asked to where everything runs: the defaults vLLM would take, and why a topology cannot be."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vllmdiag.model.errors import UsageError
from vllmdiag.model.plan import Topology
from vllmdiag.vllm.capacity import capacity
from vllmdiag.vllm.versions import in_range

_MULTI_NODE_SINCE = "0.11.1"
_DP_DEFAULT_SERVERS_SINCE = "0.10"


@dataclass(frozen=True)
class Placement:
    """A settled topology on its nodes."""

    topology: Topology
    engines_per_node: int
    """Most engines on one node; 1 where an engine spans nodes."""
    nodes_per_engine: int
    nodes_per_job: int
    jobs: int

    @property
    def local_world(self) -> int:
        """Ranks of one engine on one node."""
        return self.topology.world // self.nodes_per_engine

    @property
    def servers(self) -> int:
        """API servers of one job, on its head."""
        return self.topology.api_servers or 1

    @property
    def launcher(self) -> bool:
        """A process above the API servers that is none itself."""
        return self.servers > 1 or self.topology.dp > 1

    @property
    def idle_gpus(self) -> int:
        """GPUs of all nodes that no rank uses."""
        return self.topology.nodes * self.topology.gpus_per_node - self.jobs * self.topology.dp * self.topology.world


def settle(asked: Topology) -> Placement:
    """Fill in what vLLM would choose and place it.

    Raises:
        UsageError: there is no such server on these nodes; `why` says which number is in the way.
    """
    numbers = {"nodes": asked.nodes, "gpus-per-node": asked.gpus_per_node, "tp": asked.tp, "pp": asked.pp}
    for name, number in {**numbers, "dp": asked.dp, "api-servers": asked.api_servers or 1}.items():
        if number < 1:
            raise _bad(f"--{name} {number} is less than 1")
    executor = asked.executor or ("uni" if asked.world == 1 else "mp")
    if executor not in ("mp", "uni", "ray"):
        raise _bad(f"there is no executor {executor}: mp, uni or ray")
    if executor == "uni" and asked.world > 1:
        raise _bad(f"the executor uni runs one rank, not {asked.world}")
    per_node, nodes_per_engine = _spread(asked)
    if nodes_per_engine > 1 and executor == "mp" and not in_range(asked.version, _MULTI_NODE_SINCE, None):
        raise _bad(f"an engine over {nodes_per_engine} nodes needs vLLM {_MULTI_NODE_SINCE} or --executor ray")
    nodes_per_job = nodes_per_engine * asked.dp if nodes_per_engine > 1 else -(-asked.dp // per_node)
    if nodes_per_job > asked.nodes:
        raise _bad(
            f"{asked.dp} engines of {asked.world} ranks need {nodes_per_job} nodes of {asked.gpus_per_node} GPUs,"
            f" not {asked.nodes}"
        )
    several = asked.dp > 1 and nodes_per_job > 1
    settled = msgspec.structs.replace(
        asked,
        executor=executor,
        dp_local=per_node,
        api_servers=asked.api_servers or (asked.dp if in_range(asked.version, _DP_DEFAULT_SERVERS_SINCE, None) else 1),
        master_port=(asked.master_port or capacity().port("master")) if nodes_per_engine > 1 else None,
        rpc_port=(asked.rpc_port or capacity().port("data-parallel RPC")) if several else None,
    )
    return Placement(settled, per_node, nodes_per_engine, nodes_per_job, asked.nodes // nodes_per_job)


def _spread(asked: Topology) -> tuple[int, int]:
    """Engines on a node, and nodes of an engine."""
    gpus = asked.gpus_per_node
    if asked.world > gpus:
        if asked.world % gpus:
            raise _bad(f"{asked.world} ranks of an engine do not fill nodes of {gpus} GPUs: vLLM wants as many on each")
        if asked.dp_local not in (None, 1):
            raise _bad(f"an engine of {asked.world} ranks fills more than a node: {asked.dp_local} on one cannot be")
        return 1, asked.world // gpus
    room = gpus // asked.world
    even = asked.dp // asked.nodes if asked.dp % asked.nodes == 0 else 0
    per_node = asked.dp_local or (even if 0 < even <= room else min(room, asked.dp))
    if per_node > room:
        raise _bad(
            f"{per_node} engines of {asked.world} ranks on one node need {per_node * asked.world} GPUs, not {gpus}"
        )
    return per_node, 1


def _bad(why: str) -> UsageError:
    return UsageError(
        "no server can be started like this",
        why=why,
        next="change the sizes: tp x pp ranks make one engine, dp engines",
    )

"""The shapes of vLLM that this tier starts, as data: one row each, flags as vLLM 0.32 spells them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """What to start, and the processes that must then be there."""

    name: str
    nodes: tuple[tuple[str, ...], ...]
    """Arguments of ``vllm serve MODEL``, one row for each node; ``{port_a}`` and ``{port_b}`` are free ports."""
    workers: int
    """Over all engines and nodes."""
    engines: int = 1
    apis: int = 1
    coordinators: int = 0
    env: dict[str, str] = field(default_factory=dict)
    """``{work}`` is the private directory of the server."""
    moe: bool = False
    offline_tp: int | None = None
    """Set: no server but a script that uses the LLM class, with this many workers."""
    plugin: bool = False
    """Load the plug-in that forces fork (the CPU platform insists on spawn)."""
    uds: bool = False
    """Listen on a unix socket instead of a port."""
    since: str = "0.12.0"
    """First vLLM that knows it (of those in the table of setup_vllm.py)."""
    answers: bool = True
    """Whether this CPU build can complete a request in this shape."""


_TP2 = ("--tensor-parallel-size", "2")
_DP2 = ("--data-parallel-size", "2")
_NNODES = (*_TP2, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "{port_a}")
_HEADLESS = (*_DP2, "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1")
_RPC = ("--data-parallel-rpc-port", "{port_a}")

TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("tp1", ((),), workers=1),
        Topology("tp2", (_TP2,), workers=2),
        Topology("pp2", (("--pipeline-parallel-size", "2"),), workers=2, answers=False),
        Topology("dp2", (_DP2,), workers=2, engines=2, apis=2, coordinators=1),
        Topology("tp2dp2", ((*_TP2, *_DP2),), workers=4, engines=2, apis=2, coordinators=1),
        Topology("api2", (("--api-server-count", "2"),), workers=1, apis=2),
        Topology(
            "moe_dp2",
            ((*_DP2, "--enable-expert-parallel"),),
            workers=2,
            engines=2,
            apis=2,
            coordinators=1,
            moe=True,
            answers=False,
        ),
        Topology(
            "two_nodes",
            ((*_NNODES, "--node-rank", "0"), (*_NNODES, "--node-rank", "1", "--headless")),
            workers=2,
        ),
        Topology(
            "headless_dp2",
            ((*_HEADLESS, *_RPC), (*_HEADLESS, *_RPC, "--headless", "--data-parallel-start-rank", "1")),
            workers=2,
            engines=2,
            apis=2,
            coordinators=1,
        ),
        Topology("offline", ((),), workers=2, apis=0, offline_tp=2),
        Topology(
            "offline_nomp",
            ((),),
            workers=2,
            apis=0,
            offline_tp=2,
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        ),
        Topology(
            "prefix",
            (_TP2,),
            workers=2,
            env={"VLLM_PROCESS_NAME_PREFIX": "acme", "VLLM_RPC_BASE_PATH": "{work}/ipc"},
        ),
        Topology("arena", ((*_TP2, "--enable-shm-tensor-arena"),), workers=2, since="0.32.0"),
        Topology("fork", (_TP2,), workers=2, env={"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, plugin=True),
        Topology("uds", ((),), workers=1, uds=True),
    )
}


def available(version: str) -> list[str]:
    """The topologies that a vLLM knows."""
    number = _number(version)
    return [name for name, topology in TOPOLOGIES.items() if _number(topology.since) <= number]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

"""The plan of a topology before it runs: processes, rings, sockets, limits, and what breaks first as it grows.

Made by `vllmdiag.plan`, shown by `vllmdiag.render.plan`. Bytes and counts; one `NodePlan` stands for all of its kind.
"""

from __future__ import annotations

from .base import Fact

PLAN_SCHEMA = "vllmdiag.plan/1"
PLAN_CHECK_SCHEMA = "vllmdiag.plan-check/1"


class Topology(Fact, frozen=True, kw_only=True):
    """What is to be started. `plan.topology.settle` fills what is None as vLLM would."""

    nodes: int = 1
    gpus_per_node: int = 8
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dp: int = 1
    dp_local: int | None = None
    """Engines on one node; None: spread evenly where that comes out even, else as many as its GPUs carry."""
    ep: bool = False
    api_servers: int | None = None
    """None: one for each engine."""
    executor: str | None = None
    """``mp``, ``ray``, or ``uni`` (the engine runs the model itself); None: as vLLM chooses on GPUs."""
    version: str | None = None
    """Of vLLM; None: the newest known."""
    chunk_mib: int | None = None
    """VLLM_MQ_MAX_CHUNK_BYTES_MB, where set."""
    arena: bool = False
    """--enable-shm-tensor-arena."""
    ipc_dir: str = "/tmp"
    """Directory of the unix sockets: VLLM_RPC_BASE_PATH or TMPDIR."""
    port: int = 8000
    master_port: int | None = None
    rpc_port: int | None = None

    @property
    def world(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp * self.pcp


class RolePlan(Fact, frozen=True, kw_only=True):
    """Processes of one role on one node."""

    role: str
    processes: int
    fds: int | None = None
    """Descriptors of one of them when it serves and no client is connected; None where that was never recorded."""
    threads: int | None = None
    at_least: bool = False
    """Devices add to it (NCCL, CUDA): only the part that does not depend on them was recorded."""


class RingPlan(Fact, frozen=True, kw_only=True):
    """Rings of one kind on one node."""

    queue: str
    count: int
    chunks: int
    chunk_bytes: int
    readers: int
    """Local ones: flags in a row."""
    remote_readers: int = 0
    """They get a copy over TCP."""
    writer: str = ""
    source: str = ""
    file_bytes: int = 0
    """Of one of them."""


class SocketPlan(Fact, frozen=True, kw_only=True):
    """ZMQ endpoints of one kind that one node binds."""

    name: str
    binds: str
    connects: str
    transport: str
    """``ipc`` or ``tcp``."""
    listeners: int
    connections: int
    """To all of them together."""
    source: str = ""


class PortPlan(Fact, frozen=True, kw_only=True):
    """TCP ports of one purpose on one node."""

    purpose: str
    port: str
    """The number, or ``kernel`` where the kernel assigns it (net.ipv4.ip_local_port_range)."""
    count: int = 1


class NodePlan(Fact, frozen=True, kw_only=True):
    """One node, and how many there are like it."""

    kind: str
    """``node`` (a job of its own), ``head``, ``headless`` (engines of another head), ``leader``, ``follower``."""
    nodes: int
    engines: int
    ranks: int
    roles: tuple[RolePlan, ...]
    rings: tuple[RingPlan, ...]
    sockets: tuple[SocketPlan, ...]
    ports: tuple[PortPlan, ...]
    other_shm_bytes: int = 0
    """Segments that are no rings (tensor arena)."""
    shm_bytes: int = 0
    """Files of /dev/shm, should every slot fill."""
    shm_largest: int = 0
    """The largest single file: vLLM >= 0.29 refuses to start where it does not fit."""
    unix_paths: int = 0
    processes: int = 0
    fds: int = 0
    """Of all processes together, as far as known."""
    threads: int = 0


class Flow(Fact, frozen=True, kw_only=True):
    """One kind of traffic and how far it goes."""

    what: str
    between: str
    scope: str
    """``node``, ``network`` or ``both``."""
    over: str


class LimitPlan(Fact, frozen=True, kw_only=True):
    """A limit that the plan is held against."""

    name: str
    value: int | None
    """None: unlimited."""
    source: str


class Break(Fact, frozen=True, kw_only=True):
    """A limit that is reached when one number grows and all others stay."""

    limit: str
    where: str
    need: int
    """Now."""
    value: int
    """The limit."""
    grows: str
    """``data-parallel size``, ``tensor-parallel size``, ``API servers`` ..."""
    now: int
    at: int | None
    """The smallest value of it at which the need passes the limit; None where it never does."""
    effect: str


class Plan(Fact, frozen=True, kw_only=True):
    """The whole plan."""

    schema: str = PLAN_SCHEMA
    topology: Topology
    jobs: int
    """Independent servers of this shape that the nodes hold."""
    nodes_per_job: int
    nodes_per_engine: int
    engines_per_node: int
    idle_gpus: int
    kinds: tuple[NodePlan, ...]
    flows: tuple[Flow, ...]
    limits: tuple[LimitPlan, ...]
    breaks: tuple[Break, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


class Compared(Fact, frozen=True, kw_only=True):
    """One number of the plan beside the live one."""

    what: str
    planned: int
    seen: int | None
    """None: could not be observed."""
    tolerance: float = 0.0
    """Share of the planned number by which the live one may pass it; 0 where they must be equal."""

    agrees: bool = True
    """The live number lies within the tolerance; one that is not known does not disagree."""


class PlanCheck(Fact, frozen=True, kw_only=True):
    """A live node beside its plan."""

    schema: str = PLAN_CHECK_SCHEMA
    topology: Topology
    kind: str
    agrees: bool
    compared: tuple[Compared, ...]

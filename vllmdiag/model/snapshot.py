"""The Snapshot: everything observed of one or more vLLM instances over one window. A value, never a handle."""

from __future__ import annotations

import msgspec

from .base import Fact, Missing
from .gpu import Accelerator, Driver, FlightRecord, RasReport, RdmaPort
from .http import ClientView, HttpProbe, MetricsScrape
from .logs import LogDigest
from .process import Process
from .shm import Segment, ShmMount
from .sockets import Socket, ZmtpProbe
from .startup import FileLock, HostName, Network, RayStatus, TakenPort

SNAPSHOT_SCHEMA = "vllmdiag.snapshot/1"


class Viewer(Fact, frozen=True, kw_only=True):
    """Who looked, and what the kernel lets it see."""

    pid: int
    uid: int
    access: str
    """``full`` (may read every process), ``same-uid`` (own ones only), ``observer`` (cannot attach)."""
    capabilities: tuple[str, ...] = ()
    yama_scope: int | None = None
    hidepid: int = 0
    namespaces: dict[str, int] = msgspec.field(default_factory=dict)


class Node(Fact, frozen=True, kw_only=True):
    """The machine."""

    hostname: str = ""
    kernel: str = ""
    boot_id: str = ""
    machine: str = ""
    n_cpus: int = 0
    load1: float | None = None
    kernel_share: float | None = None
    """Part of the time of all processors that was spent in the kernel within the window, 0 to 1."""
    pressure_cpu: float | None = None
    """Part of the last 10 s in which somebody waited for a processor, 0 to 1 (/proc/pressure/cpu)."""
    mem_total: int | None = None
    mem_available: int | None = None
    clock_ticks: int = 100


class KernelLine(Fact, frozen=True, kw_only=True):
    """A line of the kernel log that matters (OOM kill, segfault, Xid)."""

    t: float | None
    """Seconds after boot."""
    text: str


class LogLine(Fact, frozen=True, kw_only=True):
    """A line of a vLLM log that was given or found."""

    file: str
    number: int
    """0 where it is not known: only the tail of the file was read."""
    text: str


class SourceCost(Fact, frozen=True, kw_only=True):
    """What one source cost."""

    source: str
    wall_s: float
    note: str = ""


class Snapshot(Fact, frozen=True, kw_only=True):
    """Everything that was seen, and everything that could not be seen, in one window."""

    schema: str = SNAPSHOT_SCHEMA
    tool: str = ""
    """Version of vllmdiag that took it."""
    observed_at: str = ""
    """End of the window, RFC 3339 UTC."""
    window_s: float = 0.0
    """Seconds between the first and the last sample."""
    pasted: bool = False
    """Put together from pasted evidence: what is absent was not given, which is not the same as not there."""
    viewer: Viewer | None = None
    node: Node = Node()
    target_pids: tuple[int, ...] = ()
    """Processes that belong to the instance asked for; others are context (owners, orphans, neighbours)."""
    processes: tuple[Process, ...] = ()
    segments: tuple[Segment, ...] = ()
    shm_mounts: tuple[ShmMount, ...] = ()
    sockets: tuple[Socket, ...] = ()
    zmtp: tuple[ZmtpProbe, ...] = ()
    """One for each ZMQ listener of the instance; empty without ``--probe-zmq``."""
    http: tuple[HttpProbe, ...] = ()
    client_views: tuple[ClientView, ...] = ()
    """Only from pasted evidence: a look from outside sees no client."""
    metrics: tuple[MetricsScrape, ...] = ()
    drivers: tuple[Driver, ...] = ()
    """Of accelerators; empty on a machine without any."""
    accelerators: tuple[Accelerator, ...] = ()
    ras: tuple[RasReport, ...] = ()
    """What NCCL says of its ranks, in the order of the answers."""
    flight_records: tuple[FlightRecord, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    """Ports of RDMA cards; empty where there are none or they were not looked at."""
    kernel_lines: tuple[KernelLine, ...] = ()
    log_lines: tuple[LogLine, ...] = ()
    logs: tuple[LogDigest, ...] = ()
    """One for each log that was given or found, in that order."""
    ray: RayStatus | None = None
    """Only from pasted evidence."""
    locks: tuple[FileLock, ...] = ()
    """Locks on files of caches; looked for only while no HTTP listener is there."""
    networks: tuple[Network, ...] = ()
    """The network namespaces of the instance; looked at only while no HTTP listener is there."""
    host_names: tuple[HostName, ...] = ()
    """Names in /etc/hosts. Only from pasted evidence."""
    taken_ports: tuple[TakenPort, ...] = ()
    """Ports it wants that others listen on; with an HTTP listener of its own only others on that port."""
    ipc_paths_missing: tuple[str, ...] = ()
    """Paths that sockets of the instance are bound to and that no longer exist in the owner's mount namespace."""
    ipc_paths_stale: tuple[str, ...] = ()
    """Socket files named as vLLM names its own, in the directories of its endpoints, that nobody is bound to."""
    missing: tuple[Missing, ...] = ()
    costs: tuple[SourceCost, ...] = ()

    def process(self, pid: int) -> Process | None:
        """The process with that pid, or None."""
        for process in self.processes:
            if process.pid == pid:
                return process
        return None

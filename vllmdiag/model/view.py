"""The InstanceView: a snapshot seen by role and rank, ready to be shown. Facts that people read, not fds and inodes.

One struct a verb: members (`ps`), endpoints, segments and mounts (`shm`), rings, stacks, clients. Built by
`vllmdiag.diagnosis.view`, shown by `vllmdiag.render`; what needs knowledge of vLLM is already said in words here.
Durations are seconds, sizes bytes, `t` seconds after the start of the window.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Fact, Missing
from .gpu import CommunicatorView, Driver, FlightView, RankView
from .http import HttpProbe
from .process import Frame
from .ring import Geometry, RingState
from .shm import PeekedSlot
from .sockets import ZmtpProbe

VIEW_SCHEMA = "vllmdiag.view/1"
INSTANCES_SCHEMA = "vllmdiag.instances/1"
REMOVALS_SCHEMA = "vllmdiag.removals/1"

Motion = Literal["moving", "idle", "stuck", "full", "broken", "unknown"]


class Party(Fact, frozen=True, kw_only=True):
    """A process as people name it."""

    label: str
    """Role and rank, e.g. ``Worker_TP1``; the command name for a process that is none of ours."""
    pid: int | None = None
    """None where it could not be known (another node, descriptors not readable)."""


class MemberView(Fact, frozen=True, kw_only=True):
    """One process of the instance, or the hole where one is expected."""

    pid: int | None
    """None for a member that the configuration demands and nobody has seen."""
    role: str
    """``APIServer``, ``EngineCore``, ``Worker``, ``DPCoordinator``, ``ResourceTracker`` ..."""
    label: str
    ranks: dict[str, int] = msgspec.field(default_factory=dict)
    """e.g. ``{"dp": 0, "tp": 1}``."""
    state: str = ""
    """Letter of stat(5); empty when it is gone."""
    doing: str = ""
    """What it does in words, e.g. ``stopped``, ``waits for requests``, ``in all_reduce``; empty where not known."""
    stage: str = ""
    """Stage of its start-up and how far it is, in words; empty once the instance serves, or where it is not known."""
    abnormal: bool = False
    """Its state alone is a reason to look: stopped, zombie, gone, uninterruptible, traced, frozen, absent."""
    known_by: str = ""
    """How role and rank were found: ``title``, ``parent``, ``rings``, ``arguments`` ..."""
    ppid: int = 0
    depth: int = 0
    """Depth in the tree of the instance; members come in tree order, parents first."""
    cpu: float | None = None
    """Cores used over the window: 1.0 is one busy core. None with fewer than two samples."""
    threads: int | None = None
    age_s: float | None = None
    rss: int | None = None
    pss: int | None = None
    shmem: int | None = None
    """Its share of shared memory (Pss_Shmem)."""
    fds: int | None = None
    fds_max: int | None = None
    note: str = ""
    """e.g. ``traced by 4711``, ``parent is gone``, ``container pid 12``."""


class ReaderView(Fact, frozen=True, kw_only=True):
    """One reader of a ring: whose flag it is, and how far behind it stands."""

    index: int
    """0-based flag index in a metadata row."""
    party: Party | None = None
    """None where the index could not be joined to a process."""
    lag: int = 0
    """Messages not taken at the end of the window."""
    unread_s: float | None = None
    """For how long, within the window, the oldest of them has waited; None where nothing waits."""
    took: int = 0
    """Messages it was seen to take in the window (a lower bound: polling can miss)."""


class RingView(Fact, frozen=True, kw_only=True):
    """One ring with its writer, its readers and what moved."""

    segment: str
    """File name in /dev/shm, or ``psm_x (deleted)``."""
    queue: str
    """``broadcast ring``, ``response ring``, ``group ring``, or ``ring`` where the role is not known."""
    geometry: Geometry
    geometry_known_by: str = ""
    writer: Party | None = None
    readers: tuple[ReaderView, ...] = ()
    last: RingState | None = None
    """State at the end of the window; None where the flags could not be read."""
    motion: Motion = "unknown"
    """``idle``: all read and still. ``stuck``: something unread and still. ``full``: stuck with every slot unread."""
    summary: str = ""
    """One line: e.g. ``slot 5 unread by Worker_TP1 for at least 3.0 s``."""
    moved: int = 0
    """Changes of state seen in the window."""
    messages: int = 0
    """Messages seen to be published in the window (a lower bound)."""
    rate: float | None = None
    """Messages per second over the polled time; None where not polled."""
    still_s: float | None = None
    """Seconds since the last change seen; the whole window when nothing changed."""
    polls: int = 0
    polled_s: float = 0.0
    overflow_slots: tuple[int, ...] = ()
    """Slots whose message went over the socket because it was too large for the slot."""
    peeked: tuple[PeekedSlot, ...] = ()
    """Only with ``--peek``: name of the call in each slot."""
    remote_readers: int = 0
    """Readers on other machines: they get a copy over TCP and have no flag."""
    missing: tuple[Missing, ...] = ()


class SegmentView(Fact, frozen=True, kw_only=True):
    """One file in /dev/shm and who holds it."""

    name: str
    kind: str
    """What it is: ``broadcast ring``, ``tensor arena``, ``all-reduce buffer``, ``semaphore``, ``other`` ..."""
    size: int
    resident: int | None = None
    """Bytes really allocated; the file is sparse, so `size` says nothing about pressure."""
    deleted: bool = False
    holders: tuple[Party, ...] = ()
    outsiders: tuple[Party, ...] = ()
    """Holders that are not of the instance."""
    age_s: float | None = None
    orphan: bool = False
    """Nobody holds it, and that could be proved; `why` says how."""
    removable: bool = False
    """An orphan that is vLLM's own by name and size: `shm clean` may remove it."""
    why: str = ""
    """Reason for `orphan`, or why it cannot be told."""
    path: str = ""
    dev: int = 0
    ino: int = 0


class Removal(Fact, frozen=True, kw_only=True):
    """What became of one segment that `shm clean` meant to remove."""

    name: str
    removed: bool
    freed: int = 0
    """Bytes given back."""
    why: str = ""
    """Why it was kept."""


class Removals(Fact, frozen=True, kw_only=True):
    """What `shm clean --yes` did."""

    schema: str = REMOVALS_SCHEMA
    removals: tuple[Removal, ...] = ()


class MountView(Fact, frozen=True, kw_only=True):
    """Capacity of /dev/shm as the target sees it (its mount namespace, not that of the shell)."""

    path: str
    size: int
    free: int
    seen_by: tuple[Party, ...] = ()
    note: str = ""
    """e.g. ``smaller than one broadcast ring``."""


class ConnectionView(Fact, frozen=True, kw_only=True):
    """One connection to an endpoint, seen from both ends."""

    peer: Party
    state: str = "ESTAB"
    to_peer: int | None = None
    """Bytes sent by the binder that the peer's kernel has not handed over (peer Recv-Q + binder Send-Q)."""
    from_peer: int | None = None
    """Bytes sent by the peer that the binder has not read (binder Recv-Q + peer Send-Q)."""
    stuck: bool = False
    """Bytes waited in every sample of the window and did not shrink."""


class EndpointView(Fact, frozen=True, kw_only=True):
    """One address that a member binds, and who is connected to it."""

    name: str
    """What it is for, e.g. ``engine input``, ``engine output``, ``ring notify``, ``HTTP``; else ``unknown``."""
    address: str
    """``ipc:///tmp/...`` or ``tcp://127.0.0.1:5557``."""
    pattern: str = ""
    """e.g. ``ROUTER <- DEALER``."""
    binder: Party | None = None
    path_exists: bool | None = None
    """False when the socket file was removed: peers that are connected stay, nobody new can come. None for TCP."""
    waiting: int | None = None
    """Connections that wait to be accepted."""
    backlog: int | None = None
    connections: tuple[ConnectionView, ...] = ()
    expected: tuple[Party, ...] = ()
    """Members that should be connected and are not."""
    probe: ZmtpProbe | None = None
    """Only with ``--probe-zmq``, and only of a ZMQ listener."""


class StackView(Fact, frozen=True, kw_only=True):
    """One thread of one member over the window."""

    pid: int
    label: str
    thread: str
    """Python's name, e.g. ``MainThread``."""
    main: bool = False
    dumps: int = 0
    """Dumps in which this thread was seen."""
    same: int = 0
    """How many of them had the frames of the last one."""
    frames: tuple[Frame, ...] = ()
    """Of the last dump, innermost first."""
    meaning: str = ""
    """What the signature says, e.g. ``waits for the reply of its workers``; empty where no signature matched."""
    signature: str = ""
    on_cpu: bool = False
    owns_gil: bool = False
    cpu: float | None = None
    """Cores used by the thread over the window."""


class CounterView(Fact, frozen=True, kw_only=True):
    """One sample of /metrics over the window."""

    name: str
    engine: str = ""
    first: float | None = None
    last: float | None = None
    gauge: bool = False
    """A gauge repeats what the last step said and may be stale; only a counter that moves proves motion."""


class HttpConnectionView(Fact, frozen=True, kw_only=True):
    """One TCP connection to the HTTP port."""

    remote: str
    server: Party | None = None
    """None where no process has accepted it (yet, or any more)."""
    state: str = "ESTAB"
    send_q: int | None = None
    """Bytes of answer that the client has not taken."""
    recv_q: int | None = None
    """Bytes of request that the server has not read."""
    stuck: bool = False
    """`send_q` stood above zero in every sample and did not shrink: the client does not read."""
    note: str = ""


class ClientView(Fact, frozen=True, kw_only=True):
    """The HTTP side of one port: who listens, who is connected, what a GET says, which counters move."""

    port: int
    servers: tuple[Party, ...] = ()
    waiting: int | None = None
    """Connections not yet accepted."""
    backlog: int | None = None
    connections: tuple[HttpConnectionView, ...] = ()
    probes: tuple[HttpProbe, ...] = ()
    counters: tuple[CounterView, ...] = ()


class GpuView(Fact, frozen=True, kw_only=True):
    """The GPU layer: a row for each rank, and what is said of several ranks."""

    drivers: tuple[Driver, ...] = ()
    ranks: tuple[RankView, ...] = ()
    communicators: tuple[CommunicatorView, ...] = ()
    limits: tuple[str, ...] = ()
    """What NCCL does not count; told whenever its counts are."""
    dumps: str = ""
    """Of which ranks flight recorder dumps were found."""
    flights: tuple[FlightView, ...] = ()


class InstanceView(Fact, frozen=True, kw_only=True):
    """One instance, seen by role and rank."""

    schema: str = VIEW_SCHEMA
    observed_at: str = ""
    window_s: float = 0.0
    vllm_version: str | None = None
    model: str | None = None
    node: str = ""
    port: int | None = None
    members: tuple[MemberView, ...] = ()
    rings: tuple[RingView, ...] = ()
    segments: tuple[SegmentView, ...] = ()
    mounts: tuple[MountView, ...] = ()
    endpoints: tuple[EndpointView, ...] = ()
    stale_ipc_paths: tuple[str, ...] = ()
    """Socket files beside those of its endpoints that a dead server has left: nobody is bound to them."""
    clients: tuple[ClientView, ...] = ()
    stacks: tuple[StackView, ...] = ()
    gpu: tuple[GpuView, ...] = ()
    """One, for the verb `gpu`; none where it was not looked at."""
    missing: tuple[Missing, ...] = ()


class InstanceLine(Fact, frozen=True, kw_only=True):
    """One instance of the host in a list to choose from."""

    pid: int
    """The pid to give as TARGET: the API server, else the topmost member."""
    role: str
    port: int | None = None
    members: int = 0
    vllm_version: str | None = None
    model: str | None = None
    abnormal: tuple[str, ...] = ()
    """What stands out at first sight, e.g. ``Worker_TP1 stopped``."""


class Instances(Fact, frozen=True, kw_only=True):
    """The instances of a host, to choose from."""

    schema: str = INSTANCES_SCHEMA
    instances: tuple[InstanceLine, ...] = ()

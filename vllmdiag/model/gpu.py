"""What is recorded of the GPU layer: devices and their driver, NCCL's own account of its ranks, flight recorder dumps.

A field that a driver does not offer is None. Nothing here is judged; thresholds and words stand in `vllmdiag.vllm.gpu`,
comparisons in `vllmdiag.diagnosis.gpu_view`.
"""

from __future__ import annotations

import msgspec

from .base import Fact

# -- devices ---------------------------------------------------------------------------------------------------------


class NvLink(Fact, frozen=True, kw_only=True):
    """One direct link of a device to another one."""

    number: int
    up: bool
    errors: int | None = None
    """Replay, recovery and CRC errors since the driver was loaded."""


class DeviceProcess(Fact, frozen=True, kw_only=True):
    """A process that the driver says uses the device. The pid is the host's: in a container it is a foreign one."""

    pid: int
    memory: int | None = None
    """Bytes; None where the driver does not tell."""


class Reading(Fact, frozen=True, kw_only=True):
    """One look at a device, `t` seconds after the start of the window."""

    t: float
    busy_pct: int | None = None
    """Share of the last sample period in which at least one kernel ran: a kernel that only spins counts as work."""
    memory_busy_pct: int | None = None
    """Share in which memory was read or written: next to nothing while a kernel spins."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Temperature at which the device slows itself down."""
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    throttle: tuple[str, ...] | None = None
    """What holds the clock down, in words; empty where nothing does."""
    pcie_generation: int | None = None
    """Falls when idle."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    links: tuple[NvLink, ...] = ()


class Trouble(Fact, frozen=True, kw_only=True):
    """Something the driver says about the health of a device."""

    code: str
    """``lost``, ``hangs``, ``reset-required``, ``ecc``, ``rows-pending``, ``rows-failed``, ``recovery``, ``fabric``."""
    text: str
    critical: bool = False


class Bridge(Fact, frozen=True, kw_only=True):
    """A PCI bridge above a device."""

    pci: str
    redirects: bool | None = None
    """ACS sends transfers between peers up to the root (ReqRedir or CmpltRedir); None where only root may read it."""


class Peer(Fact, frozen=True, kw_only=True):
    """How a device reaches another one."""

    index: int
    path: str = ""
    """As `nvidia-smi topo -m` says: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``."""
    p2p: str = ""
    """``ok``, or why the driver refuses direct access; empty where not known."""


class Accelerator(Fact, frozen=True, kw_only=True):
    """One device over the window."""

    vendor: str
    """``nvidia`` or ``amd``."""
    index: int
    """Position in the list of the driver; it need not be the one a program sees (CUDA_VISIBLE_DEVICES)."""
    name: str = ""
    uuid: str = ""
    pci: str = ""
    """``0000:61:00.0``"""
    minor: int | None = None
    """N of /dev/nvidiaN."""
    readings: tuple[Reading, ...] = ()
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    rows_remapped: int | None = None
    """Rows of memory that were replaced for good after uncorrected errors."""
    fabric: str = ""
    """State of the registration with the NVSwitch fabric in words; empty where there is none."""
    mig: bool | None = None
    """It is partitioned: utilisation and memory of the whole say nothing then."""
    node: str = ""
    """Host it is in, where evidence of several hosts is judged together; empty otherwise."""
    capability: str = ""
    """Compute capability, ``9.0``."""
    iommu: str = ""
    """Type of its IOMMU group (``DMA``, ``DMA-FQ``, ``identity``); empty where there is none or it is not known."""
    bridges: tuple[Bridge, ...] | None = None
    """Above it, the nearest last; None where not looked at."""
    peers: tuple[Peer, ...] = ()
    processes: tuple[DeviceProcess, ...] | None = None
    troubles: tuple[Trouble, ...] = ()


class Driver(Fact, frozen=True, kw_only=True):
    """The driver of one vendor, as its own library answered. A library that does not answer is a fact, not a gap."""

    vendor: str
    version: str = ""
    runtime: str = ""
    """Newest CUDA the driver can serve."""
    problem: str = ""
    """``hangs``, ``not-loaded``, ``version-mismatch``, ``no-library`` ...; empty where it answered."""
    text: str = ""
    """The problem in words."""
    next: str = ""
    took_s: float = 0.0
    fabric_manager: str = ""
    """``running`` or ``not running`` on a machine with NVSwitches; empty on one without, or where not known."""


class RdmaPort(Fact, frozen=True, kw_only=True):
    """One port of an RDMA card."""

    device: str
    """``mlx5_3``"""
    port: int = 1
    state: str = ""
    """``ACTIVE``, ``DOWN``, ``INIT`` ..."""
    devices: tuple[int, ...] = ()
    """Indices of the accelerators it is nearest to."""


class KernelImage(Fact, frozen=True, kw_only=True):
    """For which GPUs a mapped library holds kernels."""

    path: str
    archs: tuple[str, ...]
    """``sm_90``, ``sm_100a``; ``compute_90`` is PTX, which the driver can compile for newer ones."""


# -- NCCL RAS --------------------------------------------------------------------------------------------------------


class RasRank(Fact, frozen=True, kw_only=True):
    """One rank of a communicator as NCCL sees it."""

    rank: int
    pid: int | None = None
    """In the pid namespace of the rank itself."""
    host: str = ""
    device: int | None = None
    """CUDA ordinal within the process."""
    nvml_device: int | None = None
    """Index that NVML gives it in the rank's container."""
    status: str = "running"
    """``running``, ``init``, ``finalize``, ``abort``; missing: ``dead``, ``unresponsive``, ``left``, ``missing``."""
    error: str = ""
    """Initialisation or asynchronous error in words."""
    counts: dict[str, int] | None = None
    """Collectives launched by kind; in a text report only the kinds in which it differs. None where not told."""


class RasTally(Fact, frozen=True, kw_only=True):
    """How many ranks stand at one count: what a text report says of those it does not name."""

    collective: str
    count: int
    ranks: int


class RasCommunicator(Fact, frozen=True, kw_only=True):
    """One communicator."""

    hash: str = ""
    """Sixteen hex digits, as in NCCL_DEBUG logs; empty where a text report does not name it."""
    size: int = 0
    ranks: tuple[RasRank, ...] = ()
    """All that answered; in a text report only those that stand out."""
    missing: tuple[RasRank, ...] = ()
    tallies: tuple[RasTally, ...] = ()
    """Text reports only."""
    status: str = ""
    """Word of the table of a text report, e.g. ``RUNNING``."""
    copies: int = 1
    """A text report says of this many communicators the same."""


class RasReport(Fact, frozen=True, kw_only=True):
    """One answer of one listener: the ranks of one job (processes that share communicators)."""

    t: float = 0.0
    took_s: float = 0.0
    format: str = "json"
    """``json`` or ``text``."""
    pid: int | None = None
    """The process that answered, in our pid namespace; None where it could not be told."""
    nccl_version: str = ""
    processes: int | None = None
    """Processes of the job, the dead and silent ones among them."""
    communicators: tuple[RasCommunicator, ...] = ()
    dead: tuple[RasRank, ...] = ()
    """Processes declared dead for good (rank -1: no communicator is named there)."""
    silent: tuple[RasRank, ...] = ()
    """Processes that did not answer this time."""
    timeouts: int = 0
    """How often the ranks timed out on each other while the answer was put together."""


# -- flight recorder -------------------------------------------------------------------------------------------------


class FlightEntry(Fact, frozen=True, kw_only=True):
    """One collective that torch was asked for."""

    seq: int
    """Number within its process group."""
    op: str
    """``all_reduce``, ``all_gather`` ..."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the inputs."""
    dtypes: tuple[str, ...] = ()
    retired: bool = False
    """Finished and waited for; ``state`` in the dump says less (it may stay "scheduled" after completion)."""


class FlightGroup(Fact, frozen=True, kw_only=True):
    """One process group in one dump."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    """Members; empty where the dump does not tell (gloo)."""
    enqueued: int | None = None
    completed: int | None = None
    """Last numbers, which outlive the ring buffer of entries."""
    entries: tuple[FlightEntry, ...] = ()
    """The last ones."""


class FlightRecord(Fact, frozen=True, kw_only=True):
    """One dump: what one rank did last."""

    rank: int
    path: str = ""
    age_s: float | None = None
    """Seconds between its writing and the end of the window."""
    version: str = ""
    groups: tuple[FlightGroup, ...] = ()


# -- what `gpu` shows ------------------------------------------------------------------------------------------------


class RankView(Fact, frozen=True, kw_only=True):
    """One rank: its process, its device, and what each source says."""

    label: str
    """Of the process; ``GPU 3`` for a device in trouble of which no rank is known."""
    pid: int | None = None
    doing: str = ""
    """What its stack says."""
    signature: str = ""
    device: int | None = None
    """Index of the driver; None where the device could not be told."""
    device_name: str = ""
    device_known_by: str = ""
    busy_pct: int | None = None
    """Of the last reading, as all that follow."""
    memory_busy_pct: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    pcie: str = ""
    links_up: int | None = None
    links: int | None = None
    fabric: str = ""
    ecc_uncorrected: int | None = None
    rows_remapped: int | None = None
    spinning: bool | None = None
    """Fully busy with hardly any memory traffic and little power in every reading: a kernel waits. None if unknown."""
    collectives: dict[str, int] = msgspec.field(default_factory=dict)
    """Launched by NCCL, by kind, over all its communicators."""
    collectives_moved: bool | None = None
    """Any of these counts changed within the window; None where they were not seen twice."""
    troubles: tuple[Trouble, ...] = ()
    """Of the device, with the Xids of the kernel log."""
    differs: tuple[str, ...] = ()
    """In what it differs from the ranks that agree, in words."""


class CommunicatorView(Fact, frozen=True, kw_only=True):
    """One NCCL communicator over the window."""

    name: str
    """Hash, or ``4 ranks`` where it has none."""
    size: int
    nccl_version: str = ""
    members: tuple[str, ...] = ()
    """Labels of the ranks of this instance, in rank order; ``rank N on HOST`` for others."""
    counts: str = ""
    """Counts on which all ranks agree, in words."""
    moved: bool | None = None
    findings: tuple[str, ...] = ()
    """Ranks that are missing, in error, or at another count, in words."""


class FlightView(Fact, frozen=True, kw_only=True):
    """One process group in which the dumps of the ranks do not agree."""

    group: str
    seq: int
    summary: str
    suspects: tuple[int, ...] = ()
    """Global ranks."""
    ages_s: tuple[float, ...] = ()
    """Oldest and newest of the dumps compared."""

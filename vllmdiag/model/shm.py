"""What is recorded of shared memory: segments, and for candidate rings the trace of their flag bytes."""

from __future__ import annotations

from .base import Fact, Missing


class Holder(Fact, frozen=True, kw_only=True):
    """A process that has the segment open or mapped."""

    pid: int
    fds: tuple[int, ...] = ()
    mapped: bool | None = None
    """Seen in its memory map; None where the map was not read."""


class TailState(Fact, frozen=True, kw_only=True):
    """The tail of a segment as it stood from `t` until the next state: run-length coded polling."""

    t: float
    tail: bytes
    """The last `tail_bytes` of the segment. For a ring this ends with its metadata (flags)."""


class SlotHeads(Fact, frozen=True, kw_only=True):
    """The first 7 bytes of each slot under one assumed geometry: overflow mark, buffer count, length. No payload."""

    chunk_bytes: int
    chunks: int
    heads: tuple[bytes, ...]


class PeekedSlot(Fact, frozen=True, kw_only=True):
    """The name of the RPC in one slot, found by walking pickle opcodes; never an argument of it."""

    slot: int
    method: str | None
    """None where the payload is not inline (overflow) or has no leading string."""
    length: int
    overflow: bool


class RingClaim(Fact, frozen=True, kw_only=True):
    """What whoever wrote down the flags of a ring says of it (pasted evidence): shape, part, writer and readers."""

    queue: str = ""
    """``broadcast``, ``response``, ``group``; empty where it is not said."""
    n_readers: int
    chunks: int
    chunk_bytes: int
    writer: int | None = None
    """Pid."""
    readers: tuple[int | None, ...] = ()
    """Pid by flag index; None where it is not said."""


class Segment(Fact, frozen=True, kw_only=True):
    """One file of a tmpfs (normally /dev/shm), also when its name is already gone."""

    path: str
    """Path as the holder sees it."""
    dev: int
    ino: int
    size: int
    resident: int | None = None
    """Bytes really allocated (st_blocks * 512); tmpfs files are sparse."""
    deleted: bool = False
    uid: int | None = None
    mtime_age_s: float | None = None
    """Seconds since the last modification by write(2) or first-touch fault."""
    birth_age_s: float | None = None
    holders: tuple[Holder, ...] = ()
    holders_complete: bool = True
    """False when some process's descriptors could not be read: an absent holder then proves nothing."""
    tail_bytes: int = 0
    polls: int = 0
    """How often the tail was read in the window; 0 when it was not sampled."""
    polled_s: float = 0.0
    """Length of the polled time, seconds."""
    states: tuple[TailState, ...] = ()
    states_dropped: int = 0
    """State changes that were seen and counted but not kept (cap reached)."""
    heads: tuple[SlotHeads, ...] = ()
    peeked: tuple[PeekedSlot, ...] = ()
    claim: RingClaim | None = None
    """Only from pasted evidence; a look from outside works it out of size and holders."""
    missing: tuple[Missing, ...] = ()

    @property
    def name(self) -> str:
        """File name without the directory."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def key(self) -> tuple[int, int]:
        """(device, inode): identity across mount namespaces."""
        return (self.dev, self.ino)


class ShmMount(Fact, frozen=True, kw_only=True):
    """Capacity of /dev/shm as one mount namespace sees it, bytes."""

    mnt_ns: int
    path: str
    size: int
    free: int
    pids: tuple[int, ...] = ()
    """Processes of the snapshot that see this mount."""

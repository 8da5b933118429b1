"""The state of a ShmRingBuffer, decoded from its flag bytes. Pure: bytes in, state out.

Layout (the same in vLLM 0.8.5 to 0.33, source: vllm/distributed/device_communicators/shm_broadcast.py): `chunks` data slots of
`chunk_bytes`, then one metadata row of ``1 + n_readers`` bytes per slot: ``[written][read by 0]...[read by n-1]``.

The writer may reuse a slot that was never written or that every reader has read. It then sets, in this order: written=0,
copies the data, clears every read flag, written=1. A reader k takes a slot with written=1 and its own flag 0, and sets the
flag to 1 when done. So a row is, over time: 0 00 -> (0 xx while writing) -> 1 00 -> 1 10 or 1 01 -> 1 11 -> 0 11 -> ...
"""

from __future__ import annotations

from enum import Enum

from .base import Fact


class SlotState(str, Enum):
    """What a metadata row means."""

    EMPTY = "never written"
    WRITING = "being written"
    UNREAD = "unread"
    READ = "read by all"
    INVALID = "impossible"


class Geometry(Fact, frozen=True, kw_only=True):
    """Shape of a ring."""

    chunks: int
    chunk_bytes: int
    n_readers: int

    @property
    def metadata_bytes(self) -> int:
        """Bytes of flags at the end of the segment."""
        return self.chunks * (1 + self.n_readers)

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self.chunks * self.chunk_bytes + self.metadata_bytes


class Slot(Fact, frozen=True, kw_only=True):
    """One decoded slot."""

    index: int
    state: SlotState
    unread_by: tuple[int, ...] = ()
    """Reader indices that have not taken it; only for UNREAD."""


class RingState(Fact, frozen=True, kw_only=True):
    """The ring at one instant."""

    slots: tuple[Slot, ...]
    lag: tuple[int, ...]
    """Messages each reader has not taken, by reader index."""
    writer_index: int | None
    """Slot that the writer uses next; None where the flags do not determine it."""
    full: bool
    """Every slot is unread by somebody: the writer cannot proceed."""
    problems: tuple[str, ...] = ()
    """Ways in which the flags break the protocol; empty for a sound ring."""

    @property
    def pending(self) -> int:
        """Slots that at least one reader has not taken."""
        return sum(slot.state is SlotState.UNREAD for slot in self.slots)


def decode(metadata: bytes, n_readers: int) -> RingState:
    """Decode the flag rows of a ring.

    Args:
        metadata: exactly ``chunks * (1 + n_readers)`` bytes.
        n_readers: local readers (flags per row), at least 1.

    Returns:
        The state; `problems` names what the protocol cannot produce.

    Raises:
        ValueError: the length is not a multiple of the row size, or there is no reader.
    """
    row = 1 + n_readers
    if n_readers < 1 or not metadata or len(metadata) % row:
        raise ValueError(f"{len(metadata)} bytes of metadata do not make rows of {row}")
    slots = tuple(_slot(i, metadata[i * row : (i + 1) * row]) for i in range(len(metadata) // row))
    lag = tuple(sum(reader in slot.unread_by for slot in slots) for reader in range(n_readers))
    problems = tuple(_problems(slots, n_readers))
    return RingState(
        slots=slots,
        lag=lag,
        writer_index=None if problems else _writer_index(slots, n_readers),
        full=all(slot.state is SlotState.UNREAD for slot in slots),
        problems=problems,
    )


def _slot(index: int, row: bytes) -> Slot:
    written, reads = row[0], row[1:]
    if any(flag > 1 for flag in row):
        return Slot(index=index, state=SlotState.INVALID)
    if written:
        unread = tuple(k for k, flag in enumerate(reads) if not flag)
        return Slot(index=index, state=SlotState.UNREAD if unread else SlotState.READ, unread_by=unread)
    # written=0 with every read flag clear is a slot of the first lap; any read flag set means the writer is inside it.
    return Slot(index=index, state=SlotState.WRITING if any(reads) else SlotState.EMPTY)


def _problems(slots: tuple[Slot, ...], n_readers: int) -> list[str]:
    problems = []
    invalid = [s.index for s in slots if s.state is SlotState.INVALID]
    if invalid:
        problems.append(f"flags other than 0 and 1 in slot {invalid[0]}")
    if sum(s.state is SlotState.WRITING for s in slots) > 1:
        problems.append("more than one slot is being written")
    for reader in range(n_readers):
        unread = [reader in s.unread_by for s in slots]
        if _runs(unread) > 1:
            problems.append(f"the slots unread by reader {reader} are not one run")
    empty = [s.state is SlotState.EMPTY for s in slots]
    # A slot in its second write is EMPTY for an instant (flags already cleared, written not yet set), so one lone EMPTY
    # slot anywhere is sound; more than one must be the unwritten rest of the first lap.
    if _runs(empty) > 1 or (sum(empty) > 1 and not empty[-1]):
        problems.append("never-written slots before written ones")
    return problems


def _runs(flags: list[bool]) -> int:
    """Number of cyclic runs of True."""
    if all(flags):
        return 1
    return sum(flag and not flags[i - 1] for i, flag in enumerate(flags))


def _writer_index(slots: tuple[Slot, ...], n_readers: int) -> int | None:
    n = len(slots)
    for slot in slots:
        if slot.state is SlotState.WRITING:
            return slot.index
    empty = [s.index for s in slots if s.state is SlotState.EMPTY]
    if empty:
        return empty[0]  # first lap (or the lone slot in the middle of a write): the writer stands at the first of them
    pending = [s.state is SlotState.UNREAD for s in slots]
    if not any(pending):
        return None
    if all(pending):
        # Full: the writer waits at the oldest slot. The reader lists shrink from the oldest slot on, so the oldest is where
        # a reader that is behind by less than a lap starts; with everybody a whole lap behind it cannot be told.
        for reader in range(n_readers):
            unread = [reader in s.unread_by for s in slots]
            if any(unread) and not all(unread):
                return next((i + 1) % n for i in range(n) if unread[i] and not unread[(i + 1) % n])
        return None
    return next((i + 1) % n for i in range(n) if pending[i] and not pending[(i + 1) % n])

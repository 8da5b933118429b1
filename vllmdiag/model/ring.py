"""The state of a ShmRingBuffer, decoded from its flag bytes. Pure: bytes in, state out.

Layout (the same in vLLM 0.8.5 to 0.33, source: vllm/distributed/device_communicators/shm_broadcast.py): `chunks` data
slots of `chunk_bytes`, then a row of ``1 + n_readers`` bytes per slot: ``[written][read by 0]...[read by n-1]``.

The writer may reuse a slot that was never written or that every reader has read. It sets, in this order: written=0,
copies the data, clears the read flags from reader 0 on, written=1. A reader k takes a slot with written=1 and its own
flag 0, and sets the flag to 1 when done. So a row is, over time:
0 00 -> 1 00 -> 1 10 or 1 01 -> 1 11 -> 0 11 -> 0 01 -> 0 00 -> 1 00 -> ...

`decode` accepts exactly the flags that this protocol can reach (tests/property/test_ring_decoding.py walks them all).
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
    claims = _writer_claims(slots, n_readers)
    problems = (*_broken_slots(slots, metadata, row), *_contradiction(claims))
    return RingState(
        slots=slots,
        lag=lag,
        writer_index=claims[0][0] if claims and not problems else None,
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


def _writer_claims(slots: tuple[Slot, ...], n_readers: int) -> list[tuple[int, str]]:
    """Where the writer stands, by every sign of it: (slot, what says so). In a sound ring all name the same slot.

    No sign at all is sound too: with everything read, or a whole lap unread by everybody, no slot stands out.
    """
    claims = [(slot.index, f"slot {slot.index} is being written") for slot in slots if slot.state is SlotState.WRITING]
    # The unwritten rest of the first lap begins where the writer stands. A slot in the middle of a later write looks
    # never written for an instant too (flags cleared, written not yet set), and there the writer stands as well.
    empty = next((slot.index for slot in slots if slot.state is SlotState.EMPTY), None)
    if empty is not None:
        claims.append((empty, f"slot {empty} is not written yet"))
    # What a reader has not taken are the newest messages: they end just before the writer's slot.
    for reader in range(n_readers):
        unread = [reader in slot.unread_by for slot in slots]
        ends = (i for i, flag in enumerate(unread) if flag and not unread[(i + 1) % len(slots)])
        claims += [((end + 1) % len(slots), f"the slots unread by reader {reader} end at slot {end}") for end in ends]
    return claims


def _contradiction(claims: list[tuple[int, str]]) -> list[str]:
    """The first two signs of the writer that name different slots."""
    return next(([f"{claims[0][1]}, but {words}"] for slot, words in claims if slot != claims[0][0]), [])


def _broken_slots(slots: tuple[Slot, ...], metadata: bytes, row: int) -> list[str]:
    """Slots that the protocol cannot produce, each by itself."""
    problems = []
    invalid = [slot.index for slot in slots if slot.state is SlotState.INVALID]
    if invalid:
        problems.append(f"flags other than 0 and 1 in slot {invalid[0]}")
    for slot in slots:
        reads = metadata[slot.index * row + 1 : (slot.index + 1) * row]
        if slot.state is SlotState.WRITING and sorted(reads) != list(reads):
            problems.append(f"the read flags of slot {slot.index} were not cleared in order")
    empty = [slot.index for slot in slots if slot.state is SlotState.EMPTY]
    if len(empty) > 1 and empty != list(range(empty[0], len(slots))):
        problems.append(f"slot {empty[0]} is not written yet, but a later one is")
    return problems

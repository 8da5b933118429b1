"""Which shapes a ring of vLLM may have, and what other files of /dev/shm are. Pure: names and sizes in, guesses out.

A size alone does not say what a ring is for: 25165836 bytes is a group ring of two ranks and a response ring of a
multi-node job, and 10 x 24 MiB with one reader is a response ring or the broadcast ring of one worker with
VLLM_MQ_MAX_CHUNK_BYTES_MB=24. So `candidates` gives all of them, likeliest first; the holders decide.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

import msgspec

from vllmdiag.model.base import Fact
from vllmdiag.model.ring import Geometry

from .tables import load
from .versions import in_range

Queue = Literal["broadcast", "response", "remote_response", "group"]

MIB = 1 << 20


class Layout(Fact, frozen=True, kw_only=True):
    """A shape a ring may have, and which queue has it."""

    queue: Queue
    """``broadcast`` (EngineCore to workers), ``response`` (a worker to EngineCore), ``remote_response`` (the same in a
    multi-node job), ``group`` (first rank of a group to the others)."""
    chunks: int
    chunk_bytes: int
    n_readers: int
    since: str | None
    until: str | None
    source: str

    @property
    def geometry(self) -> Geometry:
        """The shape alone."""
        return Geometry(chunks=self.chunks, chunk_bytes=self.chunk_bytes, n_readers=self.n_readers)


class FileKind(Fact, frozen=True, kw_only=True):
    """What a file of /dev/shm is, by its name and size."""

    what: str
    is_vllm: Literal["yes", "maybe", "no"]
    ring: bool = False
    """Its size is that of a ring."""
    keeps_name: bool = False
    """Its maker leaves the name there as long as it is in use: gone while it is mapped, somebody else removed it."""
    source: str = ""

    @property
    def ours(self) -> bool:
        """vLLM's own: by its name, or a Python segment whose size is that of a ring to the byte."""
        return self.is_vllm == "yes" or self.ring


class _Ring(msgspec.Struct, frozen=True):
    queue: Queue
    chunks: int
    chunk_mib: int
    readers: tuple[int, int]
    source: str
    since: str | None = None
    until: str | None = None


class _Tunable(msgspec.Struct, frozen=True):
    queue: Queue
    chunks: int
    chunk_mib: tuple[int, int]
    readers: tuple[int, int]
    source: str
    since: str | None = None
    until: str | None = None


class KnownFile(msgspec.Struct, frozen=True):
    """A kind of file seen in /dev/shm; the first that fits a name (and size, where it says one) wins."""

    pattern: str
    what: str
    is_vllm: Literal["yes", "maybe", "no"]
    source: str
    ring: bool = False
    keeps_name: bool = False
    slots: int = 0
    slot_bytes: int = 0
    """Where not 0, the size must be ``slots * (slot_bytes + 1 + readers)``."""
    since: str | None = None
    until: str | None = None


class _Tables(msgspec.Struct, frozen=True):
    rings: tuple[_Ring, ...]
    tunable: _Tunable
    files: tuple[KnownFile, ...]


@cache
def _tables() -> _Tables:
    return load("layouts", _Tables)


@cache
def known_files() -> tuple[KnownFile, ...]:
    """The table behind `classify_file`."""
    return _tables().files


@cache
def candidates(size: int, version: str | None = None, broadcast_chunk_mib: int | None = None) -> tuple[Layout, ...]:
    """Every shape a ring of `size` bytes may have, likeliest first; empty where it can be no ring of vLLM.

    Args:
        size: bytes of the segment.
        version: version of vLLM; shapes of others are left out where it is known.
        broadcast_chunk_mib: VLLM_MQ_MAX_CHUNK_BYTES_MB of the writer, where known: the one size its broadcast ring has.
    """
    found = []
    for ring in _tables().rings:
        tuned_away = ring.queue == "broadcast" and broadcast_chunk_mib not in (None, ring.chunk_mib)
        if not tuned_away and in_range(version, ring.since, ring.until):
            found += _shape(size, ring, ring.chunk_mib)
    tunable = _tables().tunable
    if in_range(version, tunable.since, tunable.until):
        # The readers take far less than a MiB, so the whole MiB of one slot is the chunk.
        chunk_mib = size // tunable.chunks // MIB
        least, most = tunable.chunk_mib
        if broadcast_chunk_mib in (None, chunk_mib) and least <= chunk_mib <= most:
            found += [layout for layout in _shape(size, tunable, chunk_mib) if not _has(found, layout)]
    return tuple(found)


def _shape(size: int, ring: _Ring | _Tunable, chunk_mib: int) -> list[Layout]:
    slot_bytes, rest = divmod(size, ring.chunks)
    n_readers = slot_bytes - chunk_mib * MIB - 1
    if rest or not ring.readers[0] <= n_readers <= ring.readers[1]:
        return []
    return [
        Layout(
            queue=ring.queue,
            chunks=ring.chunks,
            chunk_bytes=chunk_mib * MIB,
            n_readers=n_readers,
            since=ring.since,
            until=ring.until,
            source=ring.source,
        )
    ]


def _has(found: list[Layout], layout: Layout) -> bool:
    return any(other.queue == layout.queue and other.geometry == layout.geometry for other in found)


def classify_file(name: str, size: int) -> FileKind:
    """What a file of /dev/shm is.

    Args:
        name: file name without the directory.
        size: bytes; -1 where unknown.
    """
    for known in known_files():
        if re.fullmatch(known.pattern, name) and _fits(known, size):
            return FileKind(
                what=known.what,
                is_vllm=known.is_vllm,
                ring=known.ring,
                keeps_name=known.keeps_name,
                source=known.source,
            )
    return FileKind(what="unknown", is_vllm="maybe")


def _fits(known: KnownFile, size: int) -> bool:
    if known.ring:
        return bool(candidates(size))
    if known.slots:
        readers = size / known.slots - known.slot_bytes - 1
        return readers.is_integer() and 1 <= readers <= _tables().tunable.readers[1]
    return True


def shape(queue: Queue, n_readers: int, version: str | None = None, chunk_mib: int | None = None) -> Layout:
    """The ring that a version makes for a queue.

    Args:
        queue: which.
        n_readers: local readers.
        version: version of vLLM; the newest where unknown.
        chunk_mib: VLLM_MQ_MAX_CHUNK_BYTES_MB, where set; only the broadcast ring heeds it.
    """
    ring = next(r for r in _tables().rings if r.queue == queue and in_range(version, r.since, r.until))
    mib = chunk_mib if queue == "broadcast" and chunk_mib else ring.chunk_mib
    return Layout(
        queue=queue,
        chunks=ring.chunks,
        chunk_bytes=mib * MIB,
        n_readers=n_readers,
        since=ring.since,
        until=ring.until,
        source=ring.source,
    )


def broadcast_ring_bytes(n_readers: int, version: str | None = None, chunk_mib: int | None = None) -> int:
    """Bytes of the broadcast ring that an engine makes: what /dev/shm must be able to hold at the least.

    Arguments as for `shape`.
    """
    return shape("broadcast", n_readers, version, chunk_mib).geometry.size

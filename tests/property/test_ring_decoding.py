"""`model.ring.decode` against a model of the protocol: a byte a step, in every order the processes can take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmdiag.model.ring import RingState, SlotState, decode


@dataclass(frozen=True)
class Ring:
    """The flags, and what only its own processes know. The steps are those of shm_broadcast.py, in its order."""

    chunks: int
    n_readers: int
    flags: bytes
    writer: int = 0
    """Slot the writer stands at."""
    phase: int = 0
    """Byte writes done at that slot: 1 marks it unwritten, then one for each read flag; publishing it moves on."""
    lags: tuple[int, ...] = ()
    """Messages published and not taken, by reader."""

    @classmethod
    def new(cls, chunks: int, n_readers: int) -> Ring:
        return cls(chunks, n_readers, bytes(chunks * (1 + n_readers)), lags=(0,) * n_readers)

    def _row(self, slot: int) -> bytes:
        width = 1 + self.n_readers
        return self.flags[slot * width : (slot + 1) * width]

    def _set(self, slot: int, column: int, value: int) -> bytes:
        at = slot * (1 + self.n_readers) + column
        return self.flags[:at] + bytes([value]) + self.flags[at + 1 :]

    @property
    def writer_blocked(self) -> bool:
        row = self._row(self.writer)
        return self.phase == 0 and bool(row[0]) and sum(row[1:]) != self.n_readers

    def write(self) -> Ring:
        """One byte of the writer; the same ring where it has to wait."""
        if self.writer_blocked:
            return self
        if self.phase <= self.n_readers:
            return replace(self, flags=self._set(self.writer, self.phase, 0), phase=self.phase + 1)
        return replace(
            self,
            flags=self._set(self.writer, 0, 1),
            writer=(self.writer + 1) % self.chunks,
            phase=0,
            lags=tuple(lag + 1 for lag in self.lags),
        )

    def read(self, reader: int) -> Ring:
        """One message taken by `reader`; the same ring where there is none for it."""
        if not self.lags[reader]:
            return self
        published = self.writer - self.lags[reader]
        slot = published % self.chunks
        assert self._row(slot)[0] == 1
        assert self._row(slot)[1 + reader] == 0
        lags = (*self.lags[:reader], self.lags[reader] - 1, *self.lags[reader + 1 :])
        return replace(self, flags=self._set(slot, 1 + reader, 1), lags=lags)

    def next_states(self) -> Iterator[Ring]:
        yield self.write()
        for reader in range(self.n_readers):
            yield self.read(reader)


@cache
def reachable(chunks: int, n_readers: int) -> frozenset[Ring]:
    """Every state a ring of that shape can ever be in."""
    seen = {Ring.new(chunks, n_readers)}
    frontier = list(seen)
    while frontier:
        found = {state for ring in frontier for state in ring.next_states()} - seen
        seen |= found
        frontier = list(found)
    return frozenset(seen)


def agrees(ring: Ring, state: RingState) -> None:
    assert state.problems == ()
    assert state.lag == ring.lags
    assert state.full == ring.writer_blocked
    assert state.writer_index in (None, ring.writer)
    assert state.pending == max(ring.lags)
    assert len(state.slots) == ring.chunks


SMALL = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 2), (6, 1), (10, 1)]


@pytest.mark.parametrize(("chunks", "n_readers"), SMALL)
def test_every_reachable_state_of_a_small_ring_is_decoded_as_it_is(chunks: int, n_readers: int) -> None:
    for ring in reachable(chunks, n_readers):
        agrees(ring, decode(ring.flags, n_readers))


@pytest.mark.parametrize(("chunks", "n_readers"), SMALL)
def test_the_writer_is_named_exactly_when_the_flags_determine_it(chunks: int, n_readers: int) -> None:
    writers = defaultdict(set)
    for ring in reachable(chunks, n_readers):
        writers[ring.flags].add(ring.writer)
    for flags, possible in writers.items():
        assert decode(flags, n_readers).writer_index == (possible.pop() if len(possible) == 1 else None), flags


@pytest.mark.parametrize(("chunks", "n_readers"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1)])
def test_flags_that_no_ring_can_reach_are_called_problems_and_no_others(chunks: int, n_readers: int) -> None:
    possible = {ring.flags for ring in reachable(chunks, n_readers)}
    for flags in map(bytes, product((0, 1), repeat=chunks * (1 + n_readers))):
        assert (not decode(flags, n_readers).problems) == (flags in possible), flags


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 9)),
    steps=st.lists(st.integers(0, 9), max_size=400),
    eager_writer=st.integers(0, 400),
)
def test_random_interleavings_of_large_rings_are_decoded_as_they_are(
    shape: tuple[int, int], steps: list[int], eager_writer: int
) -> None:
    chunks, n_readers = shape
    ring = Ring.new(chunks, n_readers)
    for _ in range(eager_writer):
        ring = ring.write()
    agrees(ring, decode(ring.flags, n_readers))
    for step in steps:
        ring = ring.write() if step == 0 or step > n_readers else ring.read(step - 1)
        agrees(ring, decode(ring.flags, n_readers))


@given(st.binary(min_size=0, max_size=120), st.integers(-1, 12))
@settings(max_examples=300)
def test_arbitrary_bytes_are_refused_by_their_length_or_decoded(metadata: bytes, n_readers: int) -> None:
    if n_readers < 1 or not metadata or len(metadata) % (1 + n_readers):
        with pytest.raises(ValueError, match="do not make rows"):
            decode(metadata, n_readers)
        return
    state = decode(metadata, n_readers)
    assert [slot.index for slot in state.slots] == list(range(len(metadata) // (1 + n_readers)))
    if any(flag > 1 for flag in metadata):
        assert state.problems
        assert state.writer_index is None
        assert any(slot.state is SlotState.INVALID for slot in state.slots)

"""Every message arrives once, in order and equal, whatever its size and however slow the readers are."""

from __future__ import annotations

import itertools
import pickle
import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.refqueue.peers import DEADLINE_S, Blob, Peer, digest, peers, read_by_all, some_bytes
from vllmdiag.model.ring import Geometry, SlotState, decode
from vllmdiag.refqueue import NEWEST, Dialect, MessageQueue
from vllmdiag.refqueue.errors import BadMessageError
from vllmdiag.refqueue.framing import INLINE_BELOW, Bare, Counted, is_overflow
from vllmdiag.refqueue.ring import ShmRingBuffer

MOST_READERS = 8
CHUNK = INLINE_BELOW + 4096
"""One buffer of 1 MiB fits into it, two do not."""
OLDEST = Dialect.of("0.8.5")


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Peer]]:
    with peers(MOST_READERS) as made:
        yield made


def filling(total: int) -> bytes:
    """Bytes whose message in a slot is `total` bytes long with its framing (3 + 4 + the pickle)."""
    size = total - 7
    for _ in range(3):  # the pickle around them is longer for longer bytes
        size -= 7 + len(pickle.dumps(bytes(size), protocol=pickle.HIGHEST_PROTOCOL)) - total
    return bytes(some_bytes(size))


AROUND = (-1, 0, 1)
sizes = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, *(INLINE_BELOW + d for d in AROUND)]))
messages = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=30),
    sizes.map(lambda size: bytes(some_bytes(size))),
    st.sampled_from(AROUND).map(lambda d: filling(CHUNK + d)),
    st.lists(sizes, max_size=3).map(lambda many: [Blob(some_bytes(size, seed)) for seed, size in enumerate(many)]),
    st.integers(20, 300).map(lambda many: [Blob(some_bytes(seed % 7, seed)) for seed in range(many)]),
)


@settings(max_examples=25)
@given(data=st.data())
def test_every_message_arrives_once_in_order_and_equal(readers: list[Peer], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, MOST_READERS), label="readers")
    sent = data.draw(st.lists(messages, min_size=1, max_size=12), label="messages")
    pauses = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.005]), min_size=n, max_size=n), label="pauses")
    dialect = data.draw(st.sampled_from([NEWEST, NEWEST, OLDEST, Dialect.of("0.12.0"), Dialect.of("0.20.0")]))
    chunks = data.draw(st.sampled_from([1, 2, 3, 10]), label="slots")
    got = read_by_all(sent, readers[:n], pauses_s=pauses, dialect=dialect, chunk_bytes=CHUNK, chunks=chunks)
    assert got == [[digest(message) for message in sent]] * n


def test_a_soak_of_200_000_messages_loses_repeats_and_mixes_up_none(readers: list[Peer]) -> None:
    sent: list[Any] = [bytes(some_bytes(400, number)) if number % 5_000 == 0 else number for number in range(200_000)]
    got = read_by_all(sent, readers[:2], pauses_s=[0.0, 0.0], dialect=NEWEST, chunk_bytes=256, chunks=10)
    assert got == [[digest(message) for message in sent]] * 2


def test_readers_on_the_brink_of_sleep_are_woken_for_every_message(readers: list[Peer]) -> None:
    """They spin for 2 ms and never look by themselves: one ping left out wrongly, and a reader hangs."""
    chance = random.Random(7)
    sent = list(range(2_000))
    slots = itertools.cycle(range(10))

    def pause_or_wait_for_all(queue: MessageQueue) -> None:
        last = (next(slots) - 1) % 10
        if chance.random() < 0.7 or not queue.ring:
            return
        deadline = time.monotonic() + DEADLINE_S
        while not queue.ring.can_write(last):  # which it can once all have read it
            assert time.monotonic() < deadline, "a reader sleeps, and nobody will wake it"
            time.sleep(0.0001)
        time.sleep(chance.choice([0, 0.0005, 0.001, 0.0015, 0.002, 0.003]))

    got = read_by_all(
        sent,
        readers[:3],
        pauses_s=[0.0, 0.0, 0.001],
        dialect=Dialect(busy_loop_s=0.002, recheck_s=None),
        chunk_bytes=64,
        chunks=10,
        before_each=pause_or_wait_for_all,
    )
    assert got == [[digest(message) for message in sent]] * 3


def vllm_overflows(buffers: Any, chunk: int) -> bool:
    """The condition of vLLM's enqueue: 6 + the pickle + (4 + each other buffer) >= the chunk."""
    return 6 + len(buffers[0]) + sum(4 + len(buffer) for buffer in buffers[1:]) >= chunk


@given(st.integers(16, 64), st.integers(0, 80))
def test_a_counted_message_overflows_exactly_where_vllms_does(chunk: int, size: int) -> None:
    slot = memoryview(bytearray(b"\xee" * chunk))
    buffers = [bytes(size)]
    fitted = Counted().put(slot, buffers)
    assert fitted is not vllm_overflows(buffers, chunk)
    assert fitted is not is_overflow(slot)


@given(messages)
def test_what_is_put_into_a_slot_is_taken_out_and_does_not_change_with_the_slot(message: Any) -> None:
    for framing in (Counted(), Bare()):
        slot = memoryview(bytearray(4 * INLINE_BELOW))
        assert framing.put(slot, framing.encode(message))
        taken = framing.take(slot)
        before = digest(taken)
        slot[:] = b"\xee" * len(slot)
        assert digest(taken) == before == digest(message)


@given(st.sampled_from([0, 1, 200]), st.integers(0, 65_535), st.lists(st.integers(0, (1 << 32) - 1), max_size=4))
def test_a_slot_that_holds_no_message_is_a_typed_error(overflow: int, count: int, lengths: list[int]) -> None:
    claimed = struct.pack(f">BH{len(lengths)}I", overflow, count, *lengths)
    slot = memoryview(bytearray(claimed.ljust(64, b"\x00")))  # zeros are no pickle
    with pytest.raises(BadMessageError):
        Counted().take(slot)


class Walk:
    """A ring and what it should hold, driven one step at a time."""

    def __init__(self, geometry: Geometry) -> None:
        self.ring = ShmRingBuffer(geometry)
        self.geometry = geometry
        self.written = 0
        self.read = [0] * geometry.n_readers

    def step(self, who: int) -> None:
        """The writer (0) or reader `who` - 1 does what it may do."""
        if who == 0:
            slot = self.written % self.geometry.chunks
            may = self.written - min(self.read) < self.geometry.chunks
            assert self.ring.can_write(slot) is may
            if may:
                self.ring.begin_write(slot)
                self.ring.publish(slot)
                self.written += 1
            return
        reader = (who - 1) % self.geometry.n_readers
        slot = self.read[reader] % self.geometry.chunks
        may = self.read[reader] < self.written
        assert self.ring.can_read(slot, reader) is may
        if may:
            self.ring.mark_read(slot, reader)
            self.read[reader] += 1


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 5), max_size=60))
def test_the_flags_allow_what_they_should_and_an_outsider_decodes_them(
    chunks: int, n_readers: int, steps: list[int]
) -> None:
    walk = Walk(Geometry(chunks=chunks, chunk_bytes=16, n_readers=n_readers))
    try:
        for who in steps:
            walk.step(who)
            with open(f"/dev/shm/{walk.ring.name}", "rb") as segment:
                state = decode(segment.read()[-walk.geometry.metadata_bytes :], n_readers)
            assert state.problems == ()
            assert state.lag == tuple(walk.written - read for read in walk.read)
            assert state.full is (walk.written - min(walk.read) == chunks)
            assert state.writer_index in {None, walk.written % chunks}
            assert all(slot.state is not SlotState.WRITING for slot in state.slots)
    finally:
        walk.ring.close()

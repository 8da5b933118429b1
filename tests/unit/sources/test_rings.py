from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmdiag.model.ring import decode
from vllmdiag.model.shm import Holder, Segment
from vllmdiag.sources import rings
from vllmdiag.vllm.footprint import flag_bytes

MIB = 1 << 20
CHUNKS, READERS = 10, 2
SIZE = CHUNKS * (MIB + 1 + READERS)
FLAGS = CHUNKS * (1 + READERS)
LIVE = """
import mmap, os, random, sys
path, chunks, readers = {path!r}, {chunks}, {readers}
fd = os.open(path, os.O_RDWR)
view = mmap.mmap(fd, os.fstat(fd).st_size)
base, row = len(view) - chunks * (1 + readers), 1 + readers
written, taken = 0, [0] * readers
print('ready', flush=True)
while True:
    if random.random() < 0.4 and written - min(taken) < chunks:
        slot = base + written % chunks * row
        view[slot] = 0
        for k in range(readers):
            view[slot + 1 + k] = 0
        view[slot] = 1
        written += 1
    k = random.randrange(readers)
    if taken[k] < written:
        view[base + taken[k] % chunks * row + 1 + k] = 1
        taken[k] += 1
"""


class Ring:
    """A sparse file in the shape of a ring, whose flags the test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, SIZE)

    @property
    def segment(self) -> Segment:
        status = os.fstat(self.fd)
        holder = Holder(pid=os.getpid(), fds=(self.fd,))
        return Segment(
            path=str(self.path), dev=status.st_dev, ino=status.st_ino, size=status.st_size, holders=(holder,)
        )

    def flags(self, flags: bytes) -> None:
        os.pwrite(self.fd, flags, SIZE - FLAGS)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(Path(f"/dev/shm/vllmdiag-test-{os.getpid()}-ring"))
    yield ring
    os.close(ring.fd)
    ring.path.unlink(missing_ok=True)


def row(number: int) -> bytes:
    return bytes([number]) * FLAGS


def polled(poller: rings.RingPoller, track: int = 0) -> int:
    return poller._tracks[track]._polls


def test_every_change_that_stands_is_kept_once_with_its_time(ring: Ring, eventually: Callable[[Any], Any]) -> None:
    t0 = time.monotonic()
    poller = rings.RingPoller([ring.segment], t0=t0 - 100).start()
    for number in (0, 1, 0, 1):
        ring.flags(row(number))
        seen = polled(poller)
        eventually(lambda seen=seen: polled(poller) > seen + 1)
    (segment,) = poller.stop()
    assert [state.tail for state in segment.states] == [row(0), row(1), row(0), row(1)]
    times = [state.t for state in segment.states]
    assert times == sorted(times)
    assert times[0] >= 100
    assert segment.tail_bytes == FLAGS
    assert segment.polls == polled(poller)
    assert segment.polled_s > 0
    assert segment.states_dropped == 0
    assert segment.missing == ()


def test_beyond_the_cap_the_first_and_the_last_states_stay_and_the_rest_is_counted(ring: Ring) -> None:
    track = rings._Track(ring.segment, "/", max_states=5)
    for number in range(20):
        ring.flags(row(number))
        track.poll(float(number))
    track.close()
    segment = track.result(20.0)
    assert [state.tail for state in segment.states] == [row(n) for n in (0, 1, 2, 3, 19)]
    assert segment.states[-1].t == 19.0
    assert segment.states_dropped == 15


def test_states_of_a_ring_at_full_speed_are_all_possible_ones(
    ring: Ring, children: Any, eventually: Callable[[Any], Any]
) -> None:
    children.python(LIVE.format(path=str(ring.path), chunks=CHUNKS, readers=READERS))
    poller = rings.RingPoller([ring.segment], hz=5000).start()
    eventually(lambda: len(poller._tracks[0]._states) > 300)
    (segment,) = poller.stop()
    for state in segment.states:
        assert decode(state.tail, READERS).problems == ()
    assert all(a.tail != b.tail for a, b in zip(segment.states, segment.states[1:], strict=False))


def test_polling_allocates_nothing_writes_nothing_and_closes_what_it_opened(
    ring: Ring, eventually: Callable[[Any], Any]
) -> None:
    before, opened = os.fstat(ring.fd), os.listdir("/proc/self/fd")
    poller = rings.RingPoller([ring.segment]).start()
    eventually(lambda: polled(poller) > 20)
    poller.stop()
    rings.read_heads(ring.segment, [(CHUNKS, MIB)])
    rings.read_slot(ring.segment, MIB, 3)
    after = os.fstat(ring.fd)
    assert after.st_blocks == 0
    assert (after.st_mtime_ns, after.st_atime_ns) == (before.st_mtime_ns, before.st_atime_ns)
    assert os.listdir("/proc/self/fd") == opened


def test_a_deleted_ring_is_polled_through_its_holder(ring: Ring, eventually: Callable[[Any], Any]) -> None:
    ring.flags(row(1))
    ring.path.unlink()
    poller = rings.RingPoller([ring.segment]).start()
    eventually(lambda: polled(poller) > 2)
    (segment,) = poller.stop()
    assert [state.tail for state in segment.states] == [row(1)]


def test_another_file_of_the_same_name_is_never_taken_for_the_segment(ring: Ring) -> None:
    unheld = Segment(path=ring.segment.path, dev=ring.segment.dev, ino=ring.segment.ino + 1, size=SIZE)
    poller = rings.RingPoller([unheld]).start()
    (segment,) = poller.stop()
    assert (segment.polls, segment.states) == (0, ())
    assert segment.missing[0].what == f"flags of {ring.path}"
    assert segment.missing[0].why.startswith("ENOENT")


def test_a_ring_truncated_under_the_poll_keeps_the_states_it_had(ring: Ring, eventually: Callable[[Any], Any]) -> None:
    poller = rings.RingPoller([ring.segment]).start()
    eventually(lambda: polled(poller) > 2)
    os.ftruncate(ring.fd, 0)
    seen = polled(poller)
    eventually(lambda: polled(poller) > seen + 1)
    (segment,) = poller.stop()
    assert [state.tail for state in segment.states] == [row(0)]


def test_a_segment_that_is_no_ring_by_its_size_is_returned_as_it_is(ring: Ring) -> None:
    os.ftruncate(ring.fd, 3 * MIB)
    segment = ring.segment
    poller = rings.RingPoller([segment]).start()
    assert poller.stop() == [segment]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (10 * (16 * MIB + 3), 30),
        (10 * (24 * MIB + 2), 20),
        (6 * (4 * MIB + 2), 12),
        (8 * (256 * MIB + 3), 24),
        (10 * (MIB + 6000), 4096),
        (10 * (MIB + 7000), 0),
        (4 * MIB, 0),
        (32, 0),
        (4096, 0),
        (0, 0),
    ],
)
def test_only_what_exceeds_whole_mebibytes_is_read_as_flags(size: int, expected: int) -> None:
    assert flag_bytes(size) == expected


def test_heads_are_seven_bytes_of_every_slot_and_a_peek_is_bounded(ring: Ring) -> None:
    for slot in range(CHUNKS):
        os.pwrite(ring.fd, bytes([slot]) * 100, slot * MIB)
    heads, other = rings.read_heads(ring.segment, [(CHUNKS, MIB), (5, 2 * MIB)])
    assert (heads.chunks, heads.chunk_bytes) == (CHUNKS, MIB)
    assert heads.heads == tuple(bytes([slot]) * 7 for slot in range(CHUNKS))
    assert other.heads == tuple(bytes([2 * slot]) * 7 for slot in range(5))
    assert rings.read_slot(ring.segment, MIB, 4, limit=10) == b"\4" * 10
    assert rings.read_slot(ring.segment, 8, 0, limit=4096) == bytes(8)


def test_a_ring_that_is_gone_cannot_be_peeked_into(ring: Ring) -> None:
    unheld = Segment(path=ring.segment.path + "-gone", dev=1, ino=2, size=SIZE)
    with pytest.raises(FileNotFoundError):
        rings.read_slot(unheld, MIB, 0)

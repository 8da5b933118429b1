"""The ring: slots of data, and one row of flag bytes for each. This file is the protocol; the rest carries it.

    +--------+--------+-----+--------+-------+-------+-----+-------+
    | slot 0 | slot 1 | ... | slot n | row 0 | row 1 | ... | row n |        a row: [written][read by 0][read by 1]...
    +--------+--------+-----+--------+-------+-------+-----+-------+

One writer, a fixed number of readers, each of which sees every message. Everyone goes through the slots in order and
keeps its own position to itself; only the flags are shared. What a row means to whom:

    written  read by k   the writer                reader k
    0        any         may write                 waits for the writer
    1        0           waits for reader k        may read
    1        1           may write, once all are   waits for the writer

and how a row moves, with two readers (reader 1 happened to be faster here):

    0 00 --> 1 00 --> 1 01 --> 1 11 --> 0 11 --> 0 01 --> 0 00 --> 1 00 --> ...
    empty    written  1 read   0 read   begin_write  publish: clear flags 0, 1, ... then written

The order is what makes it work, and fences keep it (fence.py). Where it matters:

- written=0 before the read flags are cleared, or a reader would take the old message for a new one;
- the data and the cleared read flags before written=1, or a reader would take half a message, or see its own old flag,
  take the slot for read and wait for ever;
- a reader's last look at the data before its flag, or the writer would overwrite what is being read;
- everybody's own flag before the next look at the flags of others.

No row can be seen in a state that this does not list, so an outsider can decode a ring from its flags alone
(vllmdiag.model.ring does).
"""

from __future__ import annotations

from vllmdiag.model.ring import Geometry

from .errors import NoSuchReaderError, NotARingError, QueueArgumentError
from .fence import full_fence, order_fence
from .segment import Segment

LEAST_CHUNK = 16
"""Bytes: a slot must hold the framing at least."""

LARGEST_CHUNK = (1 << 32) - 1
"""Bytes: lengths in a slot have 32 bits."""

BufferHandle = tuple[int, int, int, str]
"""How vLLM names a ring to others: (readers, chunk bytes, chunks, segment name)."""


class ShmRingBuffer:
    """A ring in shared memory. The caller keeps the position and asks before it touches a slot.

    Args:
        geometry: slots, bytes of each, readers.
        name: the segment to attach; None makes a new one, which this process then unlinks in `close`.

    Raises:
        QueueArgumentError: no ring has that shape.
        NoSpaceError, NoSegmentError, WrongSizeError: see `Segment`.
        NotARingError: the bytes where its flags should be are not all 0 or 1.
    """

    def __init__(self, geometry: Geometry, name: str | None = None) -> None:
        if geometry.chunks < 1 or geometry.n_readers < 1 or not LEAST_CHUNK <= geometry.chunk_bytes <= LARGEST_CHUNK:
            raise QueueArgumentError(f"no ring has this shape: {geometry}")
        self.geometry = geometry
        self._segment = Segment.create(geometry.size) if name is None else Segment.attach(name, geometry.size)
        self.name = self._segment.name
        memory, flags_at = self._segment.data, geometry.chunks * geometry.chunk_bytes
        self._data = [memory[at : at + geometry.chunk_bytes] for at in range(0, flags_at, geometry.chunk_bytes)]
        self._reader_flags = range(1, 1 + geometry.n_readers)
        row = 1 + geometry.n_readers
        self._rows = [memory[at : at + row] for at in range(flags_at, geometry.size, row)]
        self.all_read = b"\x01" * geometry.n_readers
        if name is None:
            memory[flags_at:] = bytes(geometry.metadata_bytes)
        elif max(memory[flags_at:]) > 1:
            self.close()
            raise NotARingError(
                f"segment {name} is no ring of {geometry.n_readers} readers", why="flags other than 0 and 1"
            )

    @classmethod
    def attach(cls, handle: BufferHandle) -> ShmRingBuffer:
        """Open the ring that `handle` names."""
        n_readers, chunk_bytes, chunks, name = handle
        return cls(Geometry(chunks=chunks, chunk_bytes=chunk_bytes, n_readers=n_readers), name)

    def handle(self) -> BufferHandle:
        """What another process needs to attach."""
        shape = self.geometry
        return shape.n_readers, shape.chunk_bytes, shape.chunks, self.name

    def check_reader(self, reader: int) -> None:
        """Raise `NoSuchReaderError` unless the ring has that reader (counted from 0)."""
        if not 0 <= reader < self.geometry.n_readers:
            raise NoSuchReaderError(f"the ring has readers 0 to {self.geometry.n_readers - 1}, none {reader}")

    def data(self, slot: int) -> memoryview:
        """The bytes of a slot. The view is the ring's own: neither keep nor release it."""
        return self._data[slot]

    def read_flags(self, slot: int) -> bytes:
        """Writer: one byte for each reader, 1 where it has read the slot. Negative slots count from the end."""
        return bytes(self._rows[slot][1:])

    def can_write(self, slot: int) -> bool:
        """Writer: whether the slot was never written, or all have read it."""
        row = self._rows[slot]
        if row[0] and row[1:] != self.all_read:
            return False
        order_fence()
        return True

    def begin_write(self, slot: int) -> None:
        """Writer: close the slot to the readers. An interrupted write leaves it so; the next one begins anew."""
        self._rows[slot][0] = 0

    def publish(self, slot: int) -> None:
        """Writer: hand the slot to the readers."""
        row = self._rows[slot]
        order_fence()
        for flag in self._reader_flags:
            row[flag] = 0
        order_fence()
        row[0] = 1
        full_fence()

    def can_read(self, slot: int, reader: int) -> bool:
        """Reader: whether the slot holds a message that this reader has not taken."""
        row = self._rows[slot]
        if not row[0] or row[1 + reader]:
            return False
        order_fence()
        return True

    def mark_read(self, slot: int, reader: int) -> None:
        """Reader: give the slot back. From here on the writer may overwrite it."""
        order_fence()
        self._rows[slot][1 + reader] = 1
        full_fence()

    def close(self) -> None:
        """Let go of the memory; the creator also removes the segment."""
        for view in (*self._data, *self._rows):
            view.release()
        self._segment.close()

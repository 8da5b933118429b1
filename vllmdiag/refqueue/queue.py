"""`MessageQueue`: one writer, and readers in this machine (through shared memory) or in others (by TCP).

    writer                                    reader k
    queue = MessageQueue(2, 2)
    handle = queue.export_handle()  ------->  queue = MessageQueue.create_from_handle(handle, k)
    queue.wait_until_ready()       <------->  queue.wait_until_ready()
    queue.enqueue(obj)              ------->  queue.dequeue()
    queue.close()                             queue.close()

`wait_until_ready` blocks until all have called it. Without it a long message sent too early would be lost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from vllmdiag.model.ring import Geometry

from .dialect import NEWEST, Dialect
from .errors import NoSuchReaderError, WrongRoleError
from .handle import Handle
from .holdings import Holdings
from .reader import LocalReader, Reader
from .ring import ShmRingBuffer
from .writer import Writer, checked_shape


class MessageQueue:
    """The writing end; `create_from_handle` makes the reading ends. Used by one thread, `shutdown` apart.

    Args:
        n_reader: all readers.
        n_local_reader: those of them that read through shared memory; the others read by TCP.
        local_reader_ranks: ranks of the local readers, in the order of their flags; default 0, 1, ...
        max_chunk_bytes: size of a slot. A longer message goes by a socket.
        max_chunks: slots.
        connect_ip: address of this machine as remote readers see it; loopback where it is not given.
        dialect: the version of vLLM to be like.

    Raises:
        QueueArgumentError: no queue has this shape.
        NoSpaceError: /dev/shm cannot hold the ring.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        *,
        dialect: Dialect = NEWEST,
    ) -> None:
        ranks = checked_shape(n_reader, n_local_reader, local_reader_ranks)
        shape = Geometry(chunks=max_chunks, chunk_bytes=max_chunk_bytes, n_readers=n_local_reader) if ranks else None
        writer = Writer(shape, ranks, n_reader - n_local_reader, connect_ip or "127.0.0.1", dialect)
        self._set_up(writer.handle, writer)

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int, *, dialect: Dialect = NEWEST) -> MessageQueue:
        """A reading end: of the ring if `rank` is one of the handle's local ranks, else by TCP.

        Args:
            handle: what `export_handle` gave the writer (`Handle.from_vllm` for a vLLM writer).
            rank: of this reader.
            dialect: what the writer speaks.

        Raises:
            NoSuchReaderError: neither the ring nor the handle has such a reader.
            NoSegmentError, WrongSizeError, NotARingError: the ring is not there, or is none of that shape.
        """
        self = cls.__new__(cls)
        if rank in handle.local_reader_ranks:
            self._set_up(handle, LocalReader(handle, rank, dialect))
        elif handle.remote_subscribe_addr is not None:
            address = handle.remote_subscribe_addr
            self._set_up(handle, Reader(Holdings(), address, dialect, ipv6=handle.remote_addr_ipv6))
        else:
            raise NoSuchReaderError(f"no reader has rank {rank}; local are {list(handle.local_reader_ranks)}")
        return self

    def _set_up(self, handle: Handle, end: Writer | Reader) -> None:
        self.handle = handle
        self._end = end
        self._finalizer = weakref.finalize(self, end.holdings.close)

    def export_handle(self) -> Handle:
        """What readers need; for `create_from_handle`."""
        return self.handle

    @property
    def ring(self) -> ShmRingBuffer | None:
        """The ring, to look at; None at a remote end."""
        return self._end.holdings.ring

    def lose_pings(self) -> None:
        """From now on the writer's pings get lost, as they may: what a lost wake-up looks like to its readers."""
        if isinstance(self._end, Writer) and self._end.pinger is not None:
            self._end.pinger.lost = True

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the writer and all readers have called this. After a timeout it may be called again.

        Args:
            timeout: seconds; None waits for ever, as vLLM does.

        Raises:
            QueueTimeoutError: somebody was missing.
        """
        self._end.wait_until_ready(timeout)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader. Waits, spinning, while the slowest local reader is a whole ring behind.

        Args:
            obj: anything that can be pickled.
            timeout: seconds to wait for a slot; None waits for ever.

        Raises:
            QueueTimeoutError: the slot was not read in time. Nothing was sent.
            NotPicklableError, TooManyBuffersError: it cannot be sent. Nothing was.
            QueueCancelledError: `shutdown` was called meanwhile.
            WrongRoleError: this is a reader.
        """
        if not isinstance(self._end, Writer):
            raise WrongRoleError("only the writer can enqueue")
        self._end.enqueue(obj, timeout)

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """Take the next object. Waits: spinning for a second after the last one, then asleep.

        Args:
            timeout: seconds to wait; None waits for ever.
            cancel: ends the wait when set, within 0.1 s of a sleep (vLLM before 0.18; since then `shutdown` does).
            indefinite: to wait long is normal: do not log it.

        Raises:
            QueueTimeoutError: nothing came in time.
            QueueCancelledError: `cancel` was set or `shutdown` called meanwhile.
            BadMessageError: a message came that cannot be understood or unpickled here. It counts as read.
            WrongRoleError: this is the writer.
        """
        if isinstance(self._end, Writer):
            raise WrongRoleError("only readers can dequeue")
        return self._end.dequeue(timeout, cancel, indefinite)

    def shutdown(self) -> None:
        """End the wait of the thread that uses this queue, now and from now on. For another thread to call."""
        self._end.shutdown()

    def close(self) -> None:
        """Close sockets and memory; the writer also unlinks the segment. Done at exit too, and twice does no harm."""
        self._finalizer()

    def __enter__(self) -> MessageQueue:  # noqa: PYI034 - typing.Self is new in Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

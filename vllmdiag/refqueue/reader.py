"""The reading ends: one through the ring, one by TCP. Each is one process, one thread.

wait for the slot -> unpickle out of it (too long for it? take it from the socket) -> give the slot back
"""

from __future__ import annotations

import threading
from typing import Any

import zmq

from .dialect import Dialect
from .errors import BadMessageError, NoSuchReaderError, QueueArgumentError, QueueCancelledError
from .framing import Bare, Counted, Framing, is_overflow
from .handle import Handle
from .holdings import Holdings
from .patience import Patience
from .ring import ShmRingBuffer
from .wakeup import SpinCondition
from .writer import READY

LOOK_AT_CANCEL_S = 0.1
"""An Event cannot wake a sleeper, so one who was given an Event sleeps in pieces of this."""


class Reader:
    """What both have: a socket that the writer publishes messages on.

    Args:
        holdings: to put its sockets with.
        address: of that socket.
        dialect: what the writer speaks.
        ipv6: whether the address is one of IPv6.
    """

    def __init__(self, holdings: Holdings, address: str, dialect: Dialect, *, ipv6: bool = False) -> None:
        self.holdings = holdings
        self.shutting_down = False
        self._dialect = dialect
        self._framing: Framing = Counted() if dialect.counted else Bare()
        self._messages = holdings.socket(zmq.SUB)
        self._messages.setsockopt(zmq.SUBSCRIBE, b"")
        self._messages.setsockopt(zmq.IPV6, int(ipv6))
        self._messages.connect(address)

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait for READY, which proves that what the writer publishes arrives here."""
        self._await_message(Patience("the writer did not send READY", timeout), None)
        if (first := self._messages.recv()) != READY:
            raise BadMessageError(f"the first message was no READY: {first[:16]!r}")

    def dequeue(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> Any:
        """See `MessageQueue.dequeue`."""
        return self._framing.join(self._receive(self._patience(timeout, indefinite), cancel))

    def shutdown(self) -> None:
        """End a wait, now and from now on."""
        self.shutting_down = True

    def _patience(self, timeout: float | None, indefinite: bool) -> Patience:
        return Patience("no message", timeout, None if indefinite else self._dialect.warn_every_s)

    def _receive(self, patience: Patience, cancel: threading.Event | None) -> list[memoryview]:
        """The next message of the socket."""
        self._await_message(patience, cancel)
        return [frame.buffer for frame in self._messages.recv_multipart(copy=False)]

    def _await_message(self, patience: Patience, cancel: threading.Event | None) -> None:
        while not self._messages.poll(0):
            self._messages.poll(patience.left_ms(LOOK_AT_CANCEL_S))
            self._check_cancelled(cancel)

    def _check_cancelled(self, cancel: threading.Event | None) -> None:
        if self.shutting_down or (cancel is not None and cancel.is_set()):
            raise QueueCancelledError("cancelled", why="shut down, or told to stop, while waiting for a message")


class LocalReader(Reader):
    """Reads from the ring.

    Args:
        handle: of the writer.
        rank: of this reader, one of the handle's local ranks.
        dialect: what the writer speaks.
    """

    def __init__(self, handle: Handle, rank: int, dialect: Dialect) -> None:
        if handle.buffer_handle is None or handle.local_subscribe_addr is None:
            raise QueueArgumentError("the handle names local ranks but no ring")
        self._ring = ShmRingBuffer.attach(handle.buffer_handle)
        self._reader = handle.local_reader_ranks.index(rank)
        try:
            self._ring.check_reader(self._reader)
        except NoSuchReaderError:
            self._ring.close()
            raise
        super().__init__(Holdings(self._ring), handle.local_subscribe_addr, dialect)
        self._slot, self._chunks = 0, self._ring.geometry.chunks
        self._spin = SpinCondition(self.holdings, handle.local_notify_addr, dialect.busy_loop_s)

    def dequeue(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> Any:
        """See `MessageQueue.dequeue`."""
        slot = self.acquire_read(timeout, cancel, indefinite)
        data = self._ring.data(slot)
        # A long message is awaited before the slot is given back: after a timeout here the next call finds the same
        # slot. (vLLM gives it back first, and from then on takes each long message for the next one.)
        frames = self._receive(self._patience(timeout, indefinite), cancel) if is_overflow(data) else None
        try:
            return self._framing.take(data) if frames is None else self._framing.join(frames)
        finally:  # a message that cannot be unpickled counts as read: it would block the writer for ever
            self._ring.mark_read(slot, self._reader)
            self._slot = (slot + 1) % self._chunks
            self._spin.record_read()

    def acquire_read(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> int:
        """Wait, first spinning and then asleep, until the next slot holds a message; return its index."""
        if not self._ring.can_read(self._slot, self._reader):
            patience = self._patience(timeout, indefinite)
            longest_sleep_s = self._dialect.recheck_s if cancel is None else LOOK_AT_CANCEL_S
            while not self._ring.can_read(self._slot, self._reader):
                self._spin.wait(patience.left_ms(longest_sleep_s))
                self._check_cancelled(cancel)
        return self._slot

    def shutdown(self) -> None:
        """End a wait, now and from now on; a sleeping reader wakes up."""
        super().shutdown()
        self._spin.cancel()

"""The writing end: one process, one thread.

    pickle it -> wait for the slot -> close it -> write -> publish -> (too long? send it by the socket) -> ping
              -> (remote readers? send it to them by TCP)

Whatever can fail for reasons of the message fails before a slot is touched. Remote readers are not waited for: what
they have not taken piles up in the sockets, and beyond the high water mark of zmq (1,000 messages) it is lost.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any

import zmq

from vllmdiag.model.ring import Geometry

from .dialect import Dialect
from .errors import QueueArgumentError, QueueCancelledError, QueueTimeoutError
from .framing import Bare, Buffers, Counted, Framing
from .handle import Handle
from .patience import Patience
from .ring import ShmRingBuffer
from .wakeup import Pinger

READY = b"READY"

LINGER_MS = 1000
"""How long `close` lets messages leave that were sent by a socket just before."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class Writer:
    """Makes the ring and the sockets, and writes.

    Args:
        geometry: the ring; None where there is no local reader.
        ranks: of the local readers, in the order of their flags.
        n_remote: readers that get their messages by TCP.
        connect_ip: where those find this machine.
        dialect: what to speak.
    """

    def __init__(
        self, geometry: Geometry | None, ranks: tuple[int, ...], n_remote: int, connect_ip: str, dialect: Dialect
    ) -> None:
        self.context: Context = zmq.Context()
        self.sockets: list[Socket] = []
        self.shutting_down = False
        self._dialect = dialect
        self._framing: Framing = Counted() if dialect.counted else Bare()
        self.ring: ShmRingBuffer | None = None
        self.pinger: Pinger | None = None
        self._local: Socket | None = None
        self._remote: Socket | None = None
        self._slot = 0
        local_addr = notify_addr = remote_addr = None
        ipv6 = False
        if geometry is not None:
            self.ring = ShmRingBuffer(geometry)
            local_addr = _ipc_address()
            self._local = self._publisher()
            self._local.bind(local_addr)
            if dialect.pings:
                notify_addr = _ipc_address()
                self.pinger = Pinger(self.context, notify_addr, self.ring, dialect.busy_loop_s)
                self.sockets.append(self.pinger.socket)
        if n_remote:
            ipv6 = ipaddress.ip_address(connect_ip).version == 6
            host = f"[{connect_ip}]" if ipv6 else connect_ip
            self._remote = self._publisher()
            self._remote.setsockopt(zmq.IPV6, int(ipv6))
            self._remote.bind(f"tcp://{host}:0")
            port = self._remote.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            remote_addr = f"tcp://{host}:{port}"
        self._awaited = [
            _Subscribers(socket, n) for socket, n in ((self._local, len(ranks)), (self._remote, n_remote)) if socket
        ]
        self.handle = Handle(
            local_reader_ranks=ranks,
            buffer_handle=self.ring.handle() if self.ring else None,
            local_subscribe_addr=local_addr,
            local_notify_addr=notify_addr,
            remote_subscribe_addr=remote_addr,
            remote_addr_ipv6=ipv6,
        )

    def _publisher(self) -> Socket:
        """XPUB is a PUB that tells of its subscribers, VERBOSE of each of them and not only of the first."""
        socket = self.context.socket(zmq.XPUB)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.sockets.append(socket)
        return socket

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait for the subscription of every reader, then send READY: a PUB socket loses what it sends before."""
        patience = Patience(timeout)
        for subscribers in self._awaited:
            subscribers.wait(patience)
            subscribers.socket.send(READY)

    def enqueue(self, obj: Any, timeout: float | None) -> None:
        """See `MessageQueue.enqueue`."""
        buffers = self._framing.encode(obj)
        if self.ring is not None and self._local is not None:
            self._write(self.ring, self._local, buffers, timeout)
        if self._remote is not None:
            self._remote.send_multipart(buffers)

    def _write(self, ring: ShmRingBuffer, overflow: Socket, buffers: Buffers, timeout: float | None) -> None:
        slot = self.acquire_write(ring, timeout)
        before = time.monotonic()
        fitted = self._framing.put(ring.data(slot), buffers)
        ring.publish(slot)
        self._slot = (slot + 1) % ring.geometry.chunks
        if not fitted:
            overflow.send_multipart(buffers)
        if self.pinger is not None:
            self.pinger.notify(slot, before)

    def acquire_write(self, ring: ShmRingBuffer, timeout: float | None) -> int:
        """Wait, spinning, until every reader has read the next slot; close it to them and return its index."""
        if not ring.can_write(self._slot):
            patience = Patience(timeout, self._dialect.warn_every_s)
            while not ring.can_write(self._slot):
                os.sched_yield()
                if self.shutting_down:
                    raise QueueCancelledError("cancelled", why="shut down while a reader has not read the next slot")
                patience.left_ms()
        ring.begin_write(self._slot)
        return self._slot

    def shutdown(self) -> None:
        """End a wait for a slot, now and from now on."""
        self.shutting_down = True


class _Subscribers:
    """Counts the readers that a publisher has; a count begun before a timeout goes on where it stood."""

    def __init__(self, socket: Socket, expected: int) -> None:
        self.socket, self._missing = socket, expected

    def wait(self, patience: Patience) -> None:
        while self._missing:
            if not self.socket.poll(patience.left_ms()):
                raise QueueTimeoutError(f"{self._missing} readers did not subscribe", next="are they all started?")
            self._missing -= self.socket.recv().startswith(b"\x01")  # 0 is a farewell


def checked_shape(n_reader: int, n_local_reader: int, local_reader_ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks of the local readers.

    Raises:
        QueueArgumentError: the numbers contradict each other.
    """
    ranks = tuple(range(n_local_reader) if local_reader_ranks is None else local_reader_ranks)
    if not 0 <= n_local_reader <= n_reader or n_reader < 1 or len(set(ranks)) != n_local_reader:
        raise QueueArgumentError(f"{n_reader} readers, {n_local_reader} of them local, with the ranks {ranks}")
    return ranks


def _ipc_address() -> str:
    return f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}"

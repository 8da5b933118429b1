"""The writing end: one process, one thread.

    pickle it -> wait for the slot -> close it -> write -> publish -> (too long? send it by the socket) -> ping
              -> (remote readers? send it to them by TCP)

Whatever can fail for reasons of the message fails before a slot is touched. Remote readers are not waited for: what
they have not taken piles up in the sockets, and beyond the high water mark of zmq (1,000 messages) it is lost.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from vllmdiag.model.ring import Geometry

from .dialect import Dialect
from .errors import QueueArgumentError, QueueCancelledError
from .framing import Bare, Buffers, Counted, Framing
from .handle import Handle
from .holdings import Holdings, Socket
from .patience import Patience
from .ring import ShmRingBuffer
from .wakeup import Pinger

READY = b"READY"

LINGER_MS = 1000
"""How long `close` lets messages leave that were sent by a socket just before."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


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
        remote_ip = _ip(connect_ip) if n_remote else None
        self.shutting_down = False
        self._dialect = dialect
        self._framing: Framing = Counted() if dialect.counted else Bare()
        self._slot = 0
        self.holdings = Holdings(ShmRingBuffer(geometry) if geometry else None)
        try:
            self._open(ranks, n_remote, remote_ip)
        except BaseException:
            self.holdings.close()
            raise

    def _open(self, ranks: tuple[int, ...], n_remote: int, remote_ip: IpAddress | None) -> None:
        ring = self.holdings.ring
        local_addr = self.holdings.ipc_address() if ring else None
        notify_addr = self.holdings.ipc_address() if ring and self._dialect.pings else None
        self._local = self._publisher(local_addr) if local_addr else None
        self.pinger = None
        if ring and notify_addr:
            self.pinger = Pinger(self.holdings, ring, notify_addr, self._dialect.busy_loop_s)
        self._remote, remote_addr = None, None
        if remote_ip is not None:
            host = f"[{remote_ip}]" if remote_ip.version == 6 else str(remote_ip)
            self._remote = self._publisher(f"tcp://{host}:0", ipv6=remote_ip.version == 6)
            remote_addr = f"tcp://{host}:{self._remote.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
        self._awaited = [
            _Subscribers(socket, n) for socket, n in ((self._local, len(ranks)), (self._remote, n_remote)) if socket
        ]
        self.handle = Handle(
            local_reader_ranks=ranks,
            buffer_handle=ring.handle() if ring else None,
            local_subscribe_addr=local_addr,
            local_notify_addr=notify_addr,
            remote_subscribe_addr=remote_addr,
            remote_addr_ipv6=remote_ip is not None and remote_ip.version == 6,
        )

    def _publisher(self, address: str, *, ipv6: bool = False) -> Socket:
        """XPUB is a PUB that tells of its subscribers, VERBOSE of each of them and not only of the first."""
        socket = self.holdings.socket(zmq.XPUB, linger_ms=LINGER_MS)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.IPV6, int(ipv6))
        socket.bind(address)
        return socket

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait for the subscription of every reader, then send READY: a PUB socket loses what it sends before."""
        patience = Patience("not all readers subscribed", timeout)
        for subscribers in self._awaited:
            subscribers.wait(patience)
            subscribers.socket.send(READY)

    def enqueue(self, obj: Any, timeout: float | None) -> None:
        """See `MessageQueue.enqueue`."""
        buffers = self._framing.encode(obj)
        if self.holdings.ring is not None and self._local is not None:
            self._write(self.holdings.ring, self._local, buffers, timeout)
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
            patience = Patience("no free slot", timeout, self._dialect.warn_every_s)
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
            while not self.socket.poll(0):
                self.socket.poll(patience.left_ms())
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


def _ip(text: str) -> IpAddress:
    try:
        return ipaddress.ip_address(text)
    except ValueError as error:
        raise QueueArgumentError(
            f"{text!r} is no address of this machine", next="give an IPv4 or IPv6 address"
        ) from error

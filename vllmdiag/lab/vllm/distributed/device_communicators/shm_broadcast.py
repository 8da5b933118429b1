"""`vllmdiag.refqueue` under the name that vLLM gives its queue, so that a stack reads as the real one does.

Nothing is added but a way to cut a remote reader off from its writer.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from vllmdiag.lab.vllm import envs
from vllmdiag.model.ring import Geometry
from vllmdiag.refqueue import Dialect
from vllmdiag.refqueue import MessageQueue as ReferenceQueue
from vllmdiag.refqueue.errors import QueueCancelledError
from vllmdiag.refqueue.writer import Writer, checked_shape

Cancelled = QueueCancelledError

_DIALECT = Dialect.of(envs.VERSION)
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction (linux/filter.h): keep 0 bytes of every packet."""


class _Writer(Writer):
    def acquire_write(self, *args: Any) -> int:
        return super().acquire_write(*args)


class MessageQueue(ReferenceQueue):
    """See `vllmdiag.refqueue.MessageQueue`."""

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
    ) -> None:
        ranks = checked_shape(n_reader, n_local_reader, local_reader_ranks)
        shape = Geometry(chunks=max_chunks, chunk_bytes=max_chunk_bytes, n_readers=n_local_reader) if ranks else None
        writer = _Writer(shape, ranks, n_reader - n_local_reader, connect_ip or "127.0.0.1", _DIALECT)
        self._set_up(writer.handle, writer)

    @classmethod
    def create_from_handle(cls, handle: Any, rank: int, *, dialect: Dialect = _DIALECT) -> MessageQueue:
        """A reading end."""
        made = super().create_from_handle(handle, rank, dialect=dialect)
        assert isinstance(made, MessageQueue)
        return made

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Meet the other ends."""
        super().wait_until_ready(timeout)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send to every reader."""
        super().enqueue(obj, timeout)

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """Take the next message."""
        return super().dequeue(timeout, cancel, indefinite)

    def cut_off(self) -> None:
        """A fault, for a remote reader: every packet from the writer is dropped on its way in, with no word to anybody.

        A socket filter does this for one connection, needs no privilege and goes with the connection.
        """
        address = self.handle.remote_subscribe_addr or ""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        code = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
        for name in os.listdir("/proc/self/fd"):
            try:
                connection = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue  # no socket, or the listing's own descriptor
            with connection:
                if _peer(connection) == (host, int(port)):
                    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _peer(connection: socket.socket) -> Any:
    try:
        return connection.getpeername()
    except OSError:
        return None

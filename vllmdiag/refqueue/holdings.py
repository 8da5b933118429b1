"""What one end of a queue holds of the machine, to be let go of together."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid

import zmq

from .ring import ShmRingBuffer

Socket = zmq.Socket[bytes]


class Holdings:
    """A zmq context of its own, its sockets, and a ring.

    Args:
        ring: None at a remote end.
    """

    def __init__(self, ring: ShmRingBuffer | None = None) -> None:
        self.ring = ring
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets: list[Socket] = []
        self._files: list[str] = []
        self._pid = os.getpid()

    def socket(self, kind: int, *, linger_ms: int = 0) -> Socket:
        """A new socket; `close` waits `linger_ms` for what it has not sent yet."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, linger_ms)
        self._sockets.append(socket)
        return socket

    def ipc_address(self) -> str:
        """A new ``ipc://`` address to bind to. zmq leaves its file behind; `close` removes it."""
        path = f"{tempfile.gettempdir()}/{uuid.uuid4()}"
        self._files.append(path)
        return f"ipc://{path}"

    def close(self) -> None:
        """Let go of all. In a forked child nothing happens: it inherited the object, but these are not its own."""
        if os.getpid() != self._pid:
            return
        for socket in self._sockets:
            socket.close()
        self._context.term()
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if self.ring is not None:
            self.ring.close()

"""The first half of a ZMTP handshake: what a ZMQ listener tells before it takes us for a peer.

We wait for its signature, send the 64 bytes of a greeting, read its greeting and its READY, and hang up. **We never
send a READY**: only that would attach us to the socket behind the listener, which would then send us the messages of
others. So the application of the owner sees nothing of it. ZMTP 3.1: RFC 37 of ZeroMQ.
"""

from __future__ import annotations

import select
import socket
import time
from typing import NamedTuple

SIGNATURE_BYTES = 10
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""Signature, version 3.0, mechanism NULL, not a server, filler."""

_COMMAND, _LONG = 0x04, 0x02
_MAX_READY = 8192  # Socket-Type and an Identity of at most 255 bytes; an application may add a few of its own


class Hello(NamedTuple):
    """What the other side said."""

    version: str
    socket_type: str
    identity: bytes | None
    """None where none was sent."""


class UnexpectedError(Exception):
    """The other side does not say what a ZMQ socket with the mechanism NULL says."""


class SilentError(Exception):
    """Nothing, or not all of it, came in time."""


class ClosedError(Exception):
    """The other side hung up."""


def ask(connection: socket.socket, deadline: float) -> Hello:
    """Let the other side introduce itself.

    Args:
        connection: connected, non-blocking, and still without a byte sent or read; the caller closes it.
        deadline: on the clock of `time.monotonic`.

    Raises:
        SilentError, ClosedError, UnexpectedError: with what had come until then, in words.
    """
    # To something else than ZMQ (a store, a rendezvous) a greeting would be garbage: it speaks first, or we never do.
    signature = _read(connection, SIGNATURE_BYTES, deadline, "no signature came")
    if not is_signature(signature):
        raise UnexpectedError("its first bytes are no ZMTP signature; nothing was sent to it")
    try:
        connection.send(GREETING)
    except ConnectionError:
        raise ClosedError("after its signature") from None
    major = _read(connection, 1, deadline, "a signature came, but no greeting")[0]
    if major < 3:
        raise UnexpectedError(f"it speaks ZMTP {major}, which tells no type before the handshake is over")
    rest = _read(connection, len(GREETING) - SIGNATURE_BYTES - 1, deadline, "its greeting stopped half-way")
    version, mechanism = f"{major}.{rest[0]}", rest[1:21].rstrip(b"\0").decode("ascii", "backslashreplace")
    if mechanism != "NULL":
        raise UnexpectedError(f"it wants the security mechanism {mechanism}")
    flags, first = _read(connection, 2, deadline, "a greeting came, but no READY")
    size = first
    if flags & _LONG:
        size = int.from_bytes(bytes([first]) + _read(connection, 7, deadline, "its READY stopped half-way"), "big")
    if not flags & _COMMAND or size > _MAX_READY:
        raise UnexpectedError("what follows its greeting is no READY")
    metadata = decode_ready(_read(connection, size, deadline, "its READY stopped half-way"))
    kind = metadata.get("socket-type", b"").decode("ascii", "backslashreplace")[:16]
    return Hello(version, kind, metadata.get("identity"))


def is_signature(data: bytes) -> bool:
    """Whether these are the 10 bytes every ZMTP peer begins with: the 8 in between are free."""
    return len(data) == SIGNATURE_BYTES and data[0] == 0xFF and data[9] == 0x7F


def decode_ready(body: bytes) -> dict[str, bytes]:
    """The properties of a READY command, by name in lower case. Raises UnexpectedError where it is none."""
    length = body[0] if body else 0
    if body[1 : 1 + length] != b"READY":
        name = body[1 : 1 + length].decode("ascii", "backslashreplace")[:16]
        raise UnexpectedError(f"what follows its greeting is no READY but {name or 'empty'}")
    properties = {}
    at = 1 + length
    while at < len(body):
        end = at + 1 + body[at]
        size = int.from_bytes(body[end : end + 4], "big")
        if end + 4 + size > len(body):
            raise UnexpectedError("its READY is cut short")
        properties[body[at + 1 : end].decode("ascii", "backslashreplace").lower()] = body[end + 4 : end + 4 + size]
        at = end + 4 + size
    return properties


def _read(connection: socket.socket, size: int, deadline: float, so_far: str) -> bytes:
    """Exactly `size` bytes: no more is taken than is looked at."""
    data = b""
    poll = select.poll()  # select() cannot watch a descriptor above 1023
    poll.register(connection, select.POLLIN)
    while len(data) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SilentError(so_far)
        try:
            chunk = connection.recv(size - len(data))
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise ClosedError(so_far)
        data += chunk
    return data

"""An HTTP/1.1 client for three GETs that no server can hold up.

It is our own because the time of each stage is evidence (for a stopped server the kernel still accepts the connection,
then nothing comes), because proxy variables must not matter, and because every byte of a hostile answer is bounded: by
the deadline, by 64 KiB of headers and by 8 MiB of body.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from vllmdiag.model.errors import UsageError

from . import procfs
from .netns import call_in_netns_of, netns_key

PATHS = ("/health", "/metrics", "/version")
MAX_HEADERS = 64 << 10
MAX_BODY = 8 << 20

_LOOPBACK = {"": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: .*)?")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
_TLS_ALERT = b"\x15\x03"
_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.EAGAIN: "backlog full",  # of a unix listener; a TCP listener with a full backlog is silent
    errno.ENOENT: "no such path or process",
}


class Endpoint(NamedTuple):
    """Where a server listens."""

    port: int
    host: str = ""
    """Address it is bound to; empty, ``0.0.0.0`` and ``::`` mean loopback. No name: DNS knows no deadline."""
    uds: str = ""
    """Path of a unix socket, as the server sees it; `port` and `host` do not matter then."""
    pid: int | None = None
    """A process of the server, whose network namespace is used, and for `uds` its file system."""
    tls: bool = False


class Answer(NamedTuple):
    """What came back, and when, in seconds after the start; None where that stage was not reached."""

    status: int | None
    body: bytes
    error: str
    """``refused``, ``timeout``, ``reset`` or other words; empty for a whole answer."""
    connect_s: float | None
    first_byte_s: float | None
    total_s: float | None


def get(endpoint: Endpoint, path: str, deadline_s: float) -> Answer:
    """One GET with the time of every stage. Never raises for what the server does, and never takes longer.

    Raises:
        UsageError: a path other than /health, /metrics, /version.
    """
    if path not in PATHS:
        raise UsageError(f"will not GET {path}", why="it may do work in the server", next=f"one of {', '.join(PATHS)}")
    exchange = _Exchange(time.monotonic(), deadline_s)
    error = ""
    try:
        exchange.run(endpoint, path)
    except TimeoutError:
        error = "timeout"
    except _BadAnswerError as bad:
        error = str(bad)
    except OSError as failed:
        error = _ERRORS.get(failed.errno or 0) or (failed.strerror or str(failed)).lower()
    times = (exchange.connect_s, exchange.first_byte_s, exchange.total_s)
    return Answer(exchange.status, bytes(exchange.body), error, *times)


class _BadAnswerError(Exception):
    """What the server sent is no HTTP, or too much; the text says which."""


@dataclass
class _Exchange:
    """One request and its answer, read through a buffer against one deadline."""

    start: float
    deadline_s: float
    status: int | None = None
    body: bytearray = field(default_factory=bytearray)
    connect_s: float | None = None
    first_byte_s: float | None = None
    total_s: float | None = None
    buffer: bytearray = field(default_factory=bytearray)
    link: socket.socket = field(init=False)

    def run(self, endpoint: Endpoint, path: str) -> None:
        if endpoint.tls:
            raise _BadAnswerError("tls")
        self.link, host = _socket(endpoint)
        with self.link:
            self._arm()
            _connect(self.link, endpoint)
            self.connect_s = self._elapsed()
            self._arm()
            self.link.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: vllmdiag\r\nConnection: close\r\n\r\n".encode()
            )
            self._read_body(self._read_head())
            self.total_s = self._elapsed()

    def _elapsed(self) -> float:
        return time.monotonic() - self.start

    def _arm(self) -> None:
        """Give the next system call what is left of the deadline."""
        left = self.deadline_s - self._elapsed()
        if left <= 0:
            raise TimeoutError
        self.link.settimeout(left)

    def _fill(self) -> bool:
        """Read what there is; False at the end of the stream."""
        self._arm()
        chunk = self.link.recv(1 << 16)
        if chunk and self.first_byte_s is None:
            self.first_byte_s = self._elapsed()
        self.buffer += chunk
        return bool(chunk)

    def _need(self) -> None:
        if not self._fill():
            raise _BadAnswerError("closed within the answer" if self.first_byte_s else "closed without an answer")

    def _line(self) -> bytes:
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > MAX_HEADERS:
                raise _BadAnswerError("not HTTP: a line without an end")
            self._need()
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return line.rstrip(b"\r")

    def _take(self, size: int) -> None:
        """Move `size` bytes into the body."""
        if len(self.body) + size > MAX_BODY:
            raise _BadAnswerError("body larger than 8 MiB")
        while size:
            if not self.buffer:
                self._need()
            part = self.buffer[:size]
            del self.buffer[: len(part)]
            self.body += part
            size -= len(part)

    def _read_head(self) -> dict[bytes, bytes]:
        while True:
            while len(self.buffer) < len(b"HTTP/"):
                self._need()
            if self.buffer.startswith(_TLS_ALERT):  # it took our request for a broken greeting
                raise _BadAnswerError("tls")
            found = _STATUS.fullmatch(self._line()) if self.buffer.startswith(b"HTTP/") else None
            if not found:
                raise _BadAnswerError("not HTTP")
            headers = self._read_headers()
            if not found[1].startswith(b"1"):  # 1xx only announces the answer
                self.status = int(found[1])
                return headers

    def _read_headers(self) -> dict[bytes, bytes]:
        headers: dict[bytes, bytes] = {}
        size = 0
        while line := self._line():
            size += len(line)
            if size > MAX_HEADERS:
                raise _BadAnswerError("headers larger than 64 KiB")
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return headers

    def _read_body(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if self.status in (204, 304):
            return
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._read_chunks()
        elif re.fullmatch(rb"\d{1,18}", length):
            self._take(int(length))
        else:
            self._take(len(self.buffer))
            while self._fill():
                self._take(len(self.buffer))

    def _read_chunks(self) -> None:
        while True:
            found = _CHUNK.fullmatch(self._line())
            if not found:
                raise _BadAnswerError("not HTTP: a broken chunk")
            size = int(found[1], 16)
            if not size:
                return  # what may follow are trailers, of no use
            self._take(size)
            if self._line():
                raise _BadAnswerError("not HTTP: a broken chunk")


def _socket(endpoint: Endpoint) -> tuple[socket.socket, str]:
    """An unconnected socket in the right network namespace, and the Host of the request. Raises OSError."""
    if endpoint.uds:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "localhost"
    family, address = _address(endpoint)
    host = f"[{address}]" if family == socket.AF_INET6 else address

    def make() -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM)

    pid = endpoint.pid
    foreign = pid is not None and netns_key(pid) != netns_key(os.getpid())
    return call_in_netns_of(pid, make) if pid is not None and foreign else make(), f"{host}:{endpoint.port}"


def _connect(opened: socket.socket, endpoint: Endpoint) -> None:
    if not endpoint.uds:
        opened.connect((_address(endpoint)[1], endpoint.port))
        return
    path = endpoint.uds
    if endpoint.pid is not None:
        start = "root" if path.startswith("/") else "cwd"
        path = procfs.proc("/", endpoint.pid, start, path.lstrip("/"))
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:  # through the handle, because an address holds 107 bytes and the path may be longer
        opened.connect(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def _address(endpoint: Endpoint) -> tuple[socket.AddressFamily, str]:
    bare = endpoint.host.strip("[]")
    address = _LOOPBACK.get(bare, bare)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)
    except (OSError, ValueError):
        raise _BadAnswerError(f"{bare} is a name, not an address") from None
    return family, address

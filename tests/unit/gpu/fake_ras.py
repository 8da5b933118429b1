"""A server that speaks the client protocol of NCCL RAS and answers with recorded reports, and servers that do not.

As a program (``fake_ras.py SAMPLE PORT``) it is one rank of a machine: all bind the same port, as NCCL's do.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

SAMPLES = Path(__file__).parent / "ras"


class Server:
    """Accepts on a port of loopback and lets `serve` talk on each connection."""

    def __init__(self, serve: Callable[[socket.socket], None] | None, port: int = 0) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(64)
        self.port = self.listener.getsockname()[1]
        self._links: list[socket.socket] = []
        if serve is not None:  # None: the kernel accepts, nobody answers, as with a process that is stopped
            threading.Thread(target=self._loop, args=(serve,), daemon=True).start()

    def _loop(self, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            self._links.append(link)
            threading.Thread(target=self._talk, args=(serve, link), daemon=True).start()

    @staticmethod
    def _talk(serve: Callable[[socket.socket], None], link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            serve(link)

    def close(self) -> None:
        """Stop accepting, and cut what is connected."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


class Ras:
    """One rank's RAS thread. `commands` are what it was asked."""

    def __init__(
        self,
        *reports: str,
        version: tuple[int, ...] = (2, 30, 7),
        chunk: int = 0,
        body: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self.reports, self.version, self.chunk, self.body = list(reports), version, chunk, body
        self.commands: list[str] = []

    def __call__(self, link: socket.socket) -> None:
        """Answer one client until the report has been sent."""
        form, buffer = "txt", b""
        while data := link.recv(4096):
            buffer += data
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                command = line.rstrip(b"\r").decode()
                self.commands.append(command)
                word = command.lower()
                if word.startswith("client protocol "):
                    link.sendall(b"SERVER PROTOCOL 2\n")
                elif word.startswith("timeout "):
                    link.sendall(b"OK\n" if word[8:].isdigit() else b"ERROR: Invalid timeout value\n")
                elif word == "set format json" and self.version >= (2, 28, 7):
                    form = "json"
                    link.sendall(b"OK\n")
                elif word in {"status", "verbose status"}:
                    self._report(link, form)
                    return  # the end of the connection ends the report
                else:
                    link.sendall(f"ERROR: Unknown command {command}\n".encode())

    def _report(self, link: socket.socket, form: str) -> None:
        if self.body is not None:
            self.body(link)
            return
        report = self.reports[0] if len(self.reports) == 1 else self.reports.pop(0)
        data = (SAMPLES / f"{report}.{form}").read_bytes()
        for at in range(0, len(data), self.chunk or len(data)):
            link.sendall(data[at : at + (self.chunk or len(data))])


def endless_line(link: socket.socket) -> None:
    """Bytes without a newline, for ever."""
    while True:
        link.sendall(b"x" * 65536)


def drip(link: socket.socket) -> None:
    """A byte now and then, for ever."""
    while True:
        link.sendall(b" ")
        time.sleep(0.02)


def hundred_megabytes(link: socket.socket) -> None:
    """More than anybody should keep."""
    block = b'{"nccl_version": "' + b"9" * (1 << 20)
    for _ in range(100):
        link.sendall(block)


def loopback_up() -> None:
    """In a new network namespace loopback is down."""
    with socket.socket() as any_socket:  # struct ifreq: name, flags; SIOCSIFFLAGS, IFF_UP
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))


if __name__ == "__main__":
    if "--loopback-up" in sys.argv:
        loopback_up()
    server = Server(Ras(sys.argv[1]), int(sys.argv[2]))
    print(server.port, flush=True)
    sys.stdin.read()

"""A client of the miniature: calls that run in the background, and one that does not read."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress


def _get(port: int, path: str, timeout_s: float) -> tuple[int | None, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return None, ""
    finally:
        connection.close()


def status(port: int, path: str, timeout_s: float = 1.0) -> int | None:
    """Status of a GET; None where no answer comes."""
    return _get(port, path, timeout_s)[0]


def text(port: int, path: str, timeout_s: float = 1.0) -> str:
    """Body of a GET; empty where no answer comes."""
    return _get(port, path, timeout_s)[1]


class Call:
    """One POST in the background."""

    def __init__(self, port: int, path: str, body: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._path, self._body = path, body
        self.status: int | None = None
        self.text = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"lab client {path}")
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            self._connection.request("POST", self._path, self._body)
            response = self._connection.getresponse()
            self.text = response.read().decode()
            self.status = response.status

    @property
    def running(self) -> bool:
        """No answer yet."""
        return self._thread.is_alive()

    def result(self, timeout_s: float = 20.0) -> tuple[int | None, str]:
        """Wait for the answer: (status, body); the status is None where the connection broke or the time was over."""
        self._thread.join(timeout_s)
        return self.status, self.text

    def cancel(self) -> None:
        """Break the connection."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


def deaf(port: int, body: str) -> socket.socket:
    """Ask for a completion and read nothing of it. The receive buffer is small, so that the server soon notices."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: lab\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())
    return sock

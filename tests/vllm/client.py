"""HTTP clients of a test server: one call in a thread, a steady load, and a client that does not read."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

CALL_TIMEOUT_S = 600.0
"""A call may hang for as long as a fault lasts; `Call.cancel` ends it sooner."""


def get(port: int, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """GET from the loopback, never through a proxy. Raises OSError or http.client.HTTPException."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def completion(model: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """Body of a POST /v1/completions."""
    return {"model": model, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True} | more


class Call(threading.Thread):
    """One POST in the background."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S)
        self._path, self._body = path, body
        self.status: int | None = None
        """HTTP status, None where no answer came."""
        self.text = ""
        self.error: Exception | None = None
        self.started_to_answer = threading.Event()
        """Set with the first bytes of the body (or at the end without any)."""
        self.start()

    def run(self) -> None:
        """Send, and read to the end."""
        try:
            self._connection.request("POST", self._path, json.dumps(self._body), {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            self.status = response.status
            while chunk := response.read1(65536):
                self.text += chunk.decode(errors="replace")
                self.started_to_answer.set()
        except (OSError, http.client.HTTPException, AttributeError, ValueError) as error:
            self.error = error  # the last two: http.client when `cancel` closed it under way
        finally:
            self.started_to_answer.set()
            self._connection.close()

    @property
    def running(self) -> bool:
        """No complete answer and no error yet."""
        return self.is_alive()

    def cancel(self) -> None:
        """Hang up and wait for the thread."""
        if sock := self._connection.sock:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.join()

    def result(self, deadline_s: float = 60.0) -> tuple[int | None, str]:
        """Wait for the end: (status, body). Raises TimeoutError."""
        self.join(deadline_s)
        if self.is_alive():
            raise TimeoutError(f"no answer within {deadline_s:g} s")
        return self.status, self.text


class Load:
    """Clients that ask again and again until they are told to end."""

    def __init__(self, port: int, body: dict[str, Any], clients: int) -> None:
        self._port, self._body = port, body
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self.completed = 0
        """Answers with status 200 so far."""
        self._threads = [threading.Thread(target=self._loop, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _loop(self, client: int) -> None:
        while True:
            with self._lock:
                if self._ending.is_set():
                    return
                call = self._calls[client] = Call(self._port, "/v1/completions", self._body)
            call.join()
            if call.status == 200:
                with self._lock:
                    self.completed += 1
            elif self._ending.wait(0.2):  # a dead server refuses at once: do not spin
                return

    def end(self) -> None:
        """Hang up everywhere."""
        with self._lock:
            self._ending.set()
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        for thread in self._threads:
            thread.join()


@contextmanager
def deaf(port: int, body: dict[str, Any], clients: int = 1) -> Iterator[list[socket.socket]]:
    """Streaming clients with a tiny receive buffer that never read."""
    payload = json.dumps(body | {"stream": True, "logprobs": 5}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(payload)}", "", ""))
    sockets = []
    try:
        for _ in range(clients):
            sock = socket.socket()
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before connect: it sets the window
            sock.connect(("127.0.0.1", port))
            sock.sendall(head.encode() + payload)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()

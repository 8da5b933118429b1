"""NCCL RAS: each rank of a job answers on one TCP port what it knows of all ranks. Bounded, whoever answers.

Every rank of a machine listens on the same port (SO_REUSEPORT), so the kernel chooses who answers. Which process it was
shows when it has accepted: the server's end of the connection gets an inode, and that is a descriptor of one process.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from vllmdiag.model.gpu import RasReport

from . import procfs
from .helper import POLL_S
from .netlink import inet_line
from .netns import call_in_netns_of, netns_key
from .sockets import socket_fds

MAX_BODY = 16 << 20
_MAX_LINE = 1024
_HELLO_S = 1.0
"""For the connection and each short answer: a rank that runs takes a millisecond."""
_LEG_S = 2
"""What each rank is given to answer the others; what NCCL adds to it is at most 5 s."""
_ALLOWED = re.compile(rb"CLIENT PROTOCOL 2|TIMEOUT \d+|SET FORMAT json|VERBOSE STATUS")
"""NCCL has others that write (CONTROL), run code in every rank (DIAGNOSTICS) or never end (MONITOR)."""

_HOPELESS = frozenset({"refused", "not-permitted", "not-ras", "stopped"})
_PATIENCE, _PATIENCE_WITH_MANY = 2, 6
"""How often the same failure is met with another try; where several ranks listen, the next one may be a better one."""


class Listener(NamedTuple):
    """The port of RAS in one network namespace, and the processes that listen on it."""

    host: str
    port: int
    pids: tuple[int, ...]


class RasError(Exception):
    """No report.

    Attributes:
        kind: ``refused``, ``silent``, ``late``, ``closed``, ``not-ras``, ``too-much``, ``malformed``,
            ``not-permitted``, ``stopped`` or ``failed``.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def ask(listener: Listener, deadline: float, stop: threading.Event | None = None) -> RasReport:
    """One connection and one report, of whichever rank the kernel chooses.

    Args:
        listener: where to ask; its first pid says in which network namespace.
        deadline: on the clock of `time.monotonic`.
        stop: nobody wants the answer any more.

    Raises:
        RasError: there is no report.
    """
    from .ras_reports import from_json, from_text  # most instances have nobody to ask, and need no parser

    start = time.monotonic()
    try:
        with _connect(listener, min(deadline, start + _HELLO_S)) as link:
            talk = _Talk(link, deadline, stop)
            _greet(talk)
            pid = _who_accepted(link, listener)
            as_json = talk.ask(b"SET FORMAT json") == b"OK"
            talk.send(b"VERBOSE STATUS")
            body = talk.rest()
    except TimeoutError:
        raise RasError("silent", "the connection was not accepted in time") from None
    except ConnectionRefusedError:
        raise RasError("refused", "nobody listens") from None
    except (ConnectionResetError, BrokenPipeError):
        raise RasError("closed", "the connection was closed") from None
    except PermissionError as error:
        raise RasError("not-permitted", f"{error.strerror}: another network namespace") from None
    except OSError as error:
        raise RasError("failed", error.strerror or str(error)) from None
    try:
        report = from_json(body) if as_json else from_text(body.decode("utf-8", "replace"))
    except ValueError as error:
        raise RasError("malformed", f"an answer that is no report: {error}") from None
    return msgspec.structs.replace(report, pid=pid, took_s=round(time.monotonic() - start, 4))


def survey(
    listener: Listener,
    deadline: float,
    clock: Callable[[], float],
    same_process: Callable[[int, int], bool],
    stop: threading.Event | None = None,
) -> tuple[list[RasReport], list[RasError]]:
    """One report of each job on the port: asked until every listening process has been heard of, or time is over.

    Args:
        listener: where to ask.
        deadline: on the clock of `time.monotonic`.
        clock: seconds since the start of the window.
        same_process: whether a pid of ours and one that a rank gave (in its own pid namespace) can be the same process.
        stop: nobody wants the answers any more.
    """
    found: dict[object, RasReport] = {}
    errors: list[RasError] = []
    unheard = set(listener.pids)
    patience = _PATIENCE if len(unheard) == 1 else _PATIENCE_WITH_MANY
    for _ in range(4 + 4 * len(listener.pids)):
        if not unheard or time.monotonic() >= deadline or (stop is not None and stop.is_set()):
            break
        t = clock()
        try:
            report = ask(listener, deadline, stop)
        except RasError as error:
            errors.append(error)
            if error.kind in _HOPELESS or sum(e.kind == error.kind for e in errors) > patience:
                break
            continue
        told = {rank.pid for c in report.communicators for rank in (*c.ranks, *c.missing) if rank.pid is not None}
        unheard -= {pid for pid in unheard if pid == report.pid or any(same_process(pid, other) for other in told)}
        found.setdefault(_job(report), msgspec.structs.replace(report, t=round(t, 3)))
        counted = sum(one.processes or 1 for one in found.values())
        if report.format == "text" and counted >= len(listener.pids):
            break  # a text names only the ranks that stand out, but it counts all
    return list(found.values()), errors


def _job(report: RasReport) -> object:
    return report.processes, tuple(sorted((c.hash, c.size) for c in report.communicators))


def _connect(listener: Listener, deadline: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    pid = listener.pids[0]

    def make() -> socket.socket:
        return socket.socket(family, socket.SOCK_STREAM)

    link = make() if netns_key(pid) == netns_key(os.getpid()) else call_in_netns_of(pid, make)
    try:
        link.settimeout(max(0.001, deadline - time.monotonic()))
        link.connect((listener.host, listener.port))
    except BaseException:
        link.close()
        raise
    return link


def _greet(talk: _Talk) -> None:
    said = talk.ask(b"CLIENT PROTOCOL 2")
    if not re.fullmatch(rb"SERVER PROTOCOL \d+", said):
        raise RasError("not-ras", f"what listens there does not speak RAS, or only encrypted: {said[:40]!r}")
    said = talk.ask(b"TIMEOUT %d" % _LEG_S)
    if said != b"OK":
        raise RasError("not-ras", f"it refuses a time-out: {said[:40]!r}")


class _Talk:
    """Lines to and from a server that may be anything."""

    def __init__(self, link: socket.socket, deadline: float, stop: threading.Event | None) -> None:
        self._link, self._deadline, self._stop = link, deadline, stop
        self._buffer = bytearray()

    def send(self, line: bytes) -> None:
        """One command."""
        if not _ALLOWED.fullmatch(line):
            raise ValueError(f"not a command that only reads: {line!r}")
        self._link.settimeout(_HELLO_S)
        self._link.sendall(line + b"\n")

    def ask(self, line: bytes) -> bytes:
        """A command that is answered by one line. Raises RasError."""
        self.send(line)
        until = min(self._deadline, time.monotonic() + _HELLO_S)
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE:
                raise RasError("not-ras", f"a line without end: {bytes(self._buffer[:40])!r}")
            if not self._more(until, "silent", f"a process holds the port but did not answer within {_HELLO_S:g} s"):
                raise RasError("closed", "the connection was closed before an answer came")
        answer, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return answer.rstrip(b"\r")

    def rest(self) -> bytes:
        """Everything up to the end of the connection. Raises RasError."""
        while self._more(self._deadline, "late", "the report did not end in time"):
            if len(self._buffer) > MAX_BODY:
                raise RasError("too-much", f"more than {MAX_BODY >> 20} MiB of answer")
        return bytes(self._buffer)

    def _more(self, until: float, kind: str, text: str) -> bool:
        """Read what has come; False at the end of the connection."""
        while True:
            if self._stop is not None and self._stop.is_set():
                raise RasError("stopped", "given up")
            left = until - time.monotonic()
            if left <= 0:
                raise RasError(kind, text)
            self._link.settimeout(min(left, POLL_S))
            with contextlib.suppress(TimeoutError):
                chunk = self._link.recv(1 << 16)
                self._buffer += chunk
                return bool(chunk)


def _who_accepted(link: socket.socket, listener: Listener) -> int | None:
    """The process that accepted this connection; None where it cannot be told."""
    ours = link.getsockname()[1]
    inode = 0
    for family in ("tcp", "tcp6"):  # a listener of both families accepts IPv4 as tcp6
        with contextlib.suppress(OSError):
            for line in procfs.text(procfs.proc("/", listener.pids[0], "net", family)).splitlines():
                row = inet_line(line, family)
                if row and row.local.endswith(f":{listener.port}") and row.remote.endswith(f":{ours}"):
                    inode = inode or row.inode
    for pid in listener.pids:
        with contextlib.suppress(OSError):
            if inode in socket_fds(pid):
                return pid
    return None


def address(environments: Sequence[dict[str, str]], host: str, port: int) -> tuple[str, int]:
    """Where RAS should listen: NCCL_RAS_ADDR (``host:port``) as any of the processes carries it, else the default."""
    for environment in environments:
        name, colon, number = environment.get("NCCL_RAS_ADDR", "").rpartition(":")
        if colon and number.isdecimal():
            return name.strip("[]"), int(number)
    return host, port

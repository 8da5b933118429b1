"""`--probe-zmq`: every ZMQ listener of an instance is asked once for its type, if no gate stands against it."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot, SourceCost
from vllmdiag.model.sockets import ProbeOutcome, Socket, ZmtpProbe

from . import zmtp
from .netns import near
from .probe_gates import candidates, refusal

BUDGET_S = 1.0
"""For one endpoint, from the connect to the answer. An IO thread that runs answers in less than 10 ms."""
TOTAL_S = 5.0
"""For all endpoints of an instance; those that are left then are not probed."""

_LONG_IDENTITY = 16
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}  # noqa: S104  nothing is bound: this is how to reach what is
_OUTCOMES: dict[int, tuple[ProbeOutcome, str]] = {
    errno.EAGAIN: ("full", "its accept queue is full"),
    errno.ECONNREFUSED: ("refused", "nobody listens there: its owner has closed it or died"),
    errno.ENOENT: ("gone", "the file is not there"),
    errno.ENOTDIR: ("gone", "the file is not there"),
    errno.ESRCH: ("gone", "its owner has ended"),
    errno.EACCES: ("not-permitted", "EACCES: the kernel refuses it to this user"),
    errno.EPERM: ("not-permitted", "EPERM: the kernel refuses it without the capability"),
}
"""What an error of the way to the listener means; any other is ``unreachable``."""


def with_probes(
    snapshot: Snapshot,
    progress: Callable[[str], None] = lambda _: None,
    budget_s: float = BUDGET_S,
    total_s: float = TOTAL_S,
) -> Snapshot:
    """The snapshot of an instance of this machine, with its ZMQ listeners probed now.

    Args:
        snapshot: taken just now.
        progress: told what is about to be done before it is.
        budget_s: for one endpoint.
        total_s: after so long no further endpoint is tried.
    """
    start = time.monotonic()
    listeners = candidates(snapshot.sockets, snapshot.target_pids)
    progress(f"probing {len(listeners)} ZMQ endpoints: one connection each, closed before the handshake is over")
    probes: list[ZmtpProbe] = []
    for listener in listeners:
        owners = [process for pid in listener.pids if (process := snapshot.process(pid)) is not None]
        if time.monotonic() - start > total_s:
            probes.append(_probe_of(listener, "gated", f"the probes before it took {total_s:g} s", advice="look again"))
        else:
            probes.append(probe(listener, owners, budget_s))
    made = sum(p.took_s is not None for p in probes)
    cost = SourceCost(source="zmq probe", wall_s=round(time.monotonic() - start, 4), note=f"{made} connections")
    return msgspec.structs.replace(snapshot, zmtp=tuple(probes), costs=(*snapshot.costs, cost))


def probe(listener: Socket, owners: Sequence[Process], budget_s: float = BUDGET_S) -> ZmtpProbe:
    """Ask one listener for its type, once. Never raises.

    Args:
        listener: a ZMQ listener, as the inventory of sockets shows it.
        owners: every process that has it open, as observed.
        budget_s: seconds from the connect to the answer.
    """
    if refused := refusal(listener, owners):
        return _probe_of(listener, "gated", refused.reason, advice=refused.next)
    start = time.monotonic()
    try:
        with _dial(listener, owners[0].pid, start + budget_s) as connection:
            hello = zmtp.ask(connection, start + budget_s)
    except zmtp.SilentError as late:
        reason = f"it accepts and says nothing for {budget_s:g} s ({late}): the IO thread behind it does not run"
        return _probe_of(listener, "silent", reason, start, advice=f"vllmdiag stacks {owners[0].pid}")
    except zmtp.ClosedError as closed:
        return _probe_of(listener, "closed", f"it hung up: {closed}", start, advice="look again")
    except zmtp.UnexpectedError as other:
        return _probe_of(listener, "unexpected", str(other), start)
    except OSError as error:
        outcome, reason = _OUTCOMES.get(error.errno or 0, ("unreachable", error.strerror or str(error)))
        sudo = "run it with sudo" if outcome == "not-permitted" else "look again"
        return _probe_of(listener, outcome, reason, start, advice=sudo)
    found = _probe_of(listener, "ready", "", start)
    identity = hello.identity
    short = identity if identity is not None and len(identity) <= _LONG_IDENTITY else b""
    return msgspec.structs.replace(
        found,
        socket_type=hello.socket_type,
        version=hello.version,
        identity=short.hex(),
        identity_length=None if identity is None else len(identity),
    )


def _probe_of(
    listener: Socket, outcome: ProbeOutcome, reason: str, start: float | None = None, advice: str = ""
) -> ZmtpProbe:
    return ZmtpProbe(
        endpoint=("ipc://" if listener.family == "unix" else "tcp://") + listener.local,
        inode=listener.inode,
        owner=next(iter(listener.pids), None),
        outcome=outcome,
        reason=reason,
        took_s=None if start is None else round(time.monotonic() - start, 6),
        next=advice,
    )


def _dial(listener: Socket, pid: int, deadline: float) -> socket.socket:
    """A connection to the listener as its owner would name it: in its mount or network namespace. Raises OSError."""
    if listener.family == "unix":
        return _dial_unix(listener.local, pid)
    host, _, port = listener.local.rpartition(":")
    host = _LOOPBACK.get(host, host.strip("[]"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    # A socket stays in the namespace it was made in.
    connection = near(pid, lambda: socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
    try:
        _finish(connection, connection.connect_ex((host, int(port))), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _dial_unix(path: str, pid: int) -> socket.socket:
    directory, name = os.path.split(path)
    # An address has 107 bytes, and a path through /proc/PID/root may have more: its directory goes in as a descriptor.
    at = os.open(f"/proc/{pid}/root{directory}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(f"/proc/self/fd/{at}/{name}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(at)


def _finish(connection: socket.socket, code: int, deadline: float) -> None:
    """Wait for a TCP connection that is under way. Raises OSError: EAGAIN where nobody answers, as on a unix socket."""
    if code == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))

"""What is recorded of sockets: one value per kernel socket, joined to pids and peers by inode."""

from __future__ import annotations

from typing import Literal

from .base import Fact

ProbeOutcome = Literal[
    "ready", "silent", "closed", "full", "refused", "gone", "unexpected", "unreachable", "not-permitted", "gated"
]
"""What became of a probe.

``ready``: it told its type. ``silent``: the kernel accepted, nobody spoke: the IO thread of the owner does not run.
``closed``: hung up in mid-greeting. ``full``: the accept queue is full. ``refused``: the file is there, nobody listens.
``gone``: the file is not there. ``unexpected``: not what a ZMQ peer says. ``unreachable``: no way to it from here.
``not-permitted``: the kernel refuses it to us. ``gated``: not tried, because it could have done harm or proved nothing.
"""


class SocketSample(Fact, frozen=True, kw_only=True):
    """Queue lengths at one time. Bytes, except for listeners (see Socket)."""

    t: float
    recv_q: int
    send_q: int
    state: str


class SocketOwner(Fact, frozen=True, kw_only=True):
    """A process that has the socket open."""

    pid: int
    fds: tuple[int, ...] = ()


class Socket(Fact, frozen=True, kw_only=True):
    """One kernel socket of the network namespace `netns`.

    For a listener `recv_q` counts connections not yet accepted and `send_q` is the backlog.
    """

    family: str
    """``unix``, ``tcp``, ``tcp6``."""
    inode: int
    """0 for a TCP connection that no process owns any more (or none has accepted yet)."""
    state: str
    """LISTEN, ESTAB, SYN-SENT, FIN-WAIT-1, CLOSE-WAIT, ..."""
    netns: int = 0
    local: str = ""
    """Path (leading @ for abstract) or ``address:port``."""
    remote: str = ""
    """``address:port`` for TCP; for unix the path of the peer where it has one."""
    peer_inode: int | None = None
    """Inode of the other end of a unix connection; None where unknown."""
    recv_q: int | None = None
    send_q: int | None = None
    owners: tuple[SocketOwner, ...] = ()
    samples: tuple[SocketSample, ...] = ()
    pending_inodes: tuple[int, ...] = ()
    """Unix listener: connections that wait to be accepted."""

    @property
    def port(self) -> int | None:
        """Local TCP port."""
        if self.family == "unix":
            return None
        tail = self.local.rsplit(":", 1)[-1]
        return int(tail) if tail.isdigit() else None

    @property
    def remote_port(self) -> int | None:
        """Remote TCP port."""
        if self.family == "unix":
            return None
        tail = self.remote.rsplit(":", 1)[-1]
        return int(tail) if tail.isdigit() else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that have it open."""
        return tuple(owner.pid for owner in self.owners)


class ZmtpProbe(Fact, frozen=True, kw_only=True):
    """What a ZMQ listener answered when it was asked for its type (``--probe-zmq``), or why it was not asked."""

    endpoint: str
    """``ipc:///tmp/...`` or ``tcp://127.0.0.1:5557``."""
    inode: int
    """Of the listener."""
    owner: int | None = None
    """Pid that binds it."""
    outcome: ProbeOutcome
    socket_type: str = ""
    """``ROUTER``, ``XPUB`` ...; empty where it was not told."""
    identity: str = ""
    """Routing id in hexadecimal; empty where unset, not told, or longer than 16 bytes."""
    identity_length: int | None = None
    """Bytes of the routing id; None where the socket's type sends none."""
    version: str = ""
    """Of ZMTP, as the listener announced it: ``3.1``."""
    took_s: float | None = None
    """From the connect to the answer, or to when it was given up; None where nothing was tried."""
    reason: str = ""
    """In words, unless it was ``ready``."""
    next: str = ""
    """What would make it possible, or what to look at instead."""

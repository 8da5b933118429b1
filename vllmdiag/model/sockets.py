"""What is recorded of sockets: one value per kernel socket, joined to pids and peers by inode."""

from __future__ import annotations

from .base import Fact


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

"""The sockets that matter to a set of processes, watched over a window, joined to owners and peers.

They are: the sockets those processes have open; the other ends of these, where they are on this machine; and every TCP
connection to a port those processes listen on, also one that no process owns (not accepted yet, or closing).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.sockets import Socket, SocketOwner, SocketSample

from . import fds, procfs
from .netlink import ProcNet, Row, SockDiag
from .netns import netns_key, netns_of

Owners = dict[int, tuple[SocketOwner, ...]]
"""Socket inode -> the processes that have it open."""


class SocketWatch:
    """Watches the sockets of some processes: call `sample` a few times within the window, then `result`, then `close`.

    Args:
        pids: the processes, in whichever network namespaces they live.
        root: where /proc is looked up; with anything but "/" only recorded /proc/PID/net tables are read.
        ports: further TCP ports that matter, for a viewer who may not read the descriptors of the processes but knows
            where they listen. Looked up in the namespaces of `pids`; in our own where there are no pids.
    """

    def __init__(self, pids: Iterable[int], root: str = "/", ports: Iterable[int] = ()) -> None:
        self._root = root
        self._pids = tuple(dict.fromkeys(pids))
        self._missing: dict[str, Missing] = {}
        self._spaces = self._recorded(set(ports)) if root != "/" else self._live(set(ports))

    def sample(self, t: float) -> None:
        """Look once, `t` seconds after the start of the window. What cannot be seen is noted for `result`."""
        dumps = [(space, self._rows(space)) for space in self._spaces]
        # Descriptors are read after the tables: a socket accepted in between is then merely not seen yet.
        owners = self._owners()
        for space, rows in dumps:
            space.take(t, rows, owners)

    def result(self) -> tuple[tuple[Socket, ...], tuple[Missing, ...]]:
        """The sockets in a fixed order (namespace, family, local, remote, inode), and what could not be seen."""
        sockets = [socket for space in self._spaces for socket in space.sockets()]
        sockets.sort(key=lambda s: (s.netns, s.family, s.local, s.remote, s.inode))
        return tuple(sockets), tuple(self._missing.values())

    @property
    def bound_paths(self) -> frozenset[str]:
        """Every path that somebody in these namespaces was bound to in some look, of whichever process."""
        return frozenset(path for space in self._spaces for path in space.bound)

    def close(self) -> None:
        """Close the netlink sockets."""
        for space in self._spaces:
            space.table.close()

    def _recorded(self, ports: set[int]) -> list[_Namespace]:
        """A recording holds one namespace: the tables of the first process that has any."""
        for pid in self._pids:
            if os.path.isdir(procfs.proc(self._root, pid, "net")):
                return [_Namespace(pid, 0, ProcNet(pid, self._root), ports)]
        self._miss(Missing(what="sockets", why="the recording holds no /proc/PID/net", next="record them too"))
        return []

    def _live(self, ports: set[int]) -> list[_Namespace]:
        ours = netns_key(os.getpid())
        spaces: dict[int, _Namespace] = {}
        for pid in self._pids or (os.getpid(),):
            key = netns_key(pid)
            if key and key not in spaces:
                spaces[key] = _Namespace(pid, netns_of(pid), self._table(pid, key == ours), set(ports))
        return list(spaces.values())

    def _table(self, pid: int, ours: bool) -> SockDiag | ProcNet:
        try:
            return SockDiag(None if ours else pid)
        except OSError as error:
            self._miss(_no_netlink(pid, error))
            return ProcNet(pid)

    def _rows(self, space: _Namespace) -> list[Row]:
        try:
            return list(space.table.rows())
        except OSError as error:
            if isinstance(space.table, SockDiag):  # a kernel or a sandbox without unix_diag or tcp_diag
                self._miss(_no_netlink(space.pid, error))
                space.table.close()
                space.table = ProcNet(space.pid)
                return self._rows(space)
            self._miss(procfs.missing(f"sockets in the network namespace of pid {space.pid}", error))
            return []

    def _owners(self) -> Owners:
        found: dict[int, list[SocketOwner]] = {}
        for pid in self._pids:
            for inode, numbers in self._fds(pid).items():
                found.setdefault(inode, []).append(SocketOwner(pid=pid, fds=numbers))
        return {inode: tuple(owners) for inode, owners in found.items()}

    def _fds(self, pid: int) -> dict[int, tuple[int, ...]]:
        try:
            return socket_fds(pid, self._root)
        except OSError as error:
            if error.errno not in procfs.GONE:  # that it died within the window, the process table says
                self._miss(procfs.missing(f"sockets of pid {pid}", error))
            return {}

    def _miss(self, missing: Missing) -> None:
        self._missing.setdefault(missing.what, missing)


def _no_netlink(pid: int, error: OSError) -> Missing:
    return procfs.missing(
        f"peers and queues of unix sockets in the network namespace of pid {pid}",
        error,
        hint="run it with CAP_SYS_ADMIN (sudo), or inside the container of the process",
    )


@dataclass
class _Track:
    """One socket over the window."""

    row: Row
    remote: str = ""
    owners: tuple[SocketOwner, ...] = ()
    samples: list[SocketSample] = field(default_factory=list)


@dataclass
class _Namespace:
    """One network namespace, seen through one of its processes."""

    pid: int
    netns: int
    table: SockDiag | ProcNet
    ports: set[int]
    tracks: dict[tuple[str, int, str, str], _Track] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)

    def take(self, t: float, rows: list[Row], owners: Owners) -> None:
        """Add one dump of the namespace."""
        names = {row.inode: row.local for row in rows if row.family == "unix" and row.local}
        self.bound.update(names.values())
        for row in self._relevant(rows, owners):
            track = self.tracks.setdefault(_key(row), _Track(row))
            track.row = row
            track.remote = row.remote or names.get(row.peer_inode or 0, "")
            track.owners = owners.get(row.inode, ())
            if row.recv_q is not None:
                sample = SocketSample(t=t, recv_q=row.recv_q, send_q=row.send_q or 0, state=row.state)
                track.samples.append(sample)

    def _relevant(self, rows: list[Row], owners: Owners) -> list[Row]:
        near = {inode for row in rows if row.inode in owners for inode in row.pending_inodes}
        self.ports |= {_port(row.local) for row in rows if row.state == "LISTEN" and row.inode in owners}
        self.ports.discard(0)
        kept: list[Row] = []
        others: list[Row] = []
        for row in rows:
            ours = row.inode in owners or row.peer_inode in owners or row.inode in near or _key(row) in self.tracks
            (kept if ours or _port(row.local) in self.ports else others).append(row)
        far_ends = {(row.remote, row.local) for row in kept if row.remote}
        return kept + [row for row in others if row.remote and (row.local, row.remote) in far_ends]

    def sockets(self) -> list[Socket]:
        """What was seen, as values."""
        return [
            Socket(
                family=track.row.family,
                inode=track.row.inode,
                state=track.row.state,
                netns=self.netns,
                local=track.row.local,
                remote=track.remote,
                peer_inode=track.row.peer_inode,
                recv_q=track.row.recv_q,
                send_q=track.row.send_q,
                owners=track.owners,
                samples=tuple(track.samples),
                pending_inodes=track.row.pending_inodes,
            )
            for track in self.tracks.values()
        ]


def _key(row: Row) -> tuple[str, int, str, str]:
    """Identity over time: a connection keeps its addresses while its inode comes (accept) and goes (close)."""
    if row.family == "unix" or not row.remote:
        return (row.family, row.inode, "", "")
    return (row.family, 0, row.local, row.remote)


def _port(address: str) -> int:
    """Port of ``address:port``; 0 for anything else, such as the path of a unix socket."""
    host, colon, port = address.rpartition(":")
    return int(port) if colon and port.isdecimal() and not host.startswith(("/", "@")) else 0


def socket_fds(pid: int, root: str = "/") -> dict[int, tuple[int, ...]]:
    """The sockets that one process has open: inode -> descriptors.

    Raises:
        OSError: another uid or fewer capabilities than the target (EACCES), or the process is gone.
    """
    found: dict[int, list[int]] = {}
    for fd, link in fds.read_links(pid, root):
        if link.startswith("socket:["):
            found.setdefault(int(link[8:-1]), []).append(fd)
    return {inode: tuple(numbers) for inode, numbers in found.items()}


def owners_of(inodes: Iterable[int], root: str = "/") -> tuple[Owners, Missing | None]:
    """Who on the whole machine has these sockets open. Costs a walk over every process (34 ms for 5,000 sockets).

    Returns:
        The owners, and a Missing where some have none and processes could not be read: that then proves nothing.
    """
    wanted = set(inodes) - {0}
    found: dict[int, list[SocketOwner]] = {}
    hidden = 0
    for pid in procfs.pids(root):
        try:
            mine = socket_fds(pid, root)
        except OSError as error:
            hidden += error.errno not in procfs.GONE
            continue
        for inode in wanted.intersection(mine):
            found.setdefault(inode, []).append(SocketOwner(pid=pid, fds=mine[inode]))
    missing = Missing(
        what="owners of peer sockets",
        why=f"the descriptors of {hidden} processes may not be read",
        next="run it with sudo",
    )
    return {inode: tuple(owners) for inode, owners in found.items()}, missing if hidden and wanted - set(
        found
    ) else None


def with_owners(sockets: Iterable[Socket], owners: Owners) -> tuple[Socket, ...]:
    """The sockets, with the owners filled in where none was known."""
    return tuple(
        socket if socket.owners else msgspec.structs.replace(socket, owners=owners.get(socket.inode, ()))
        for socket in sockets
    )

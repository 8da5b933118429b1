"""Who outside the instance listens on a port that the instance is to bind."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping

from vllmdiag.model.process import Process
from vllmdiag.model.startup import TakenPort

from . import procfs
from .netlink import ProcNet, Row, SockDiag
from .netns import netns_key
from .proc import parse_stat
from .sockets import owners_of


def taken_ports(
    wanted: Mapping[str, int], host: str | None, members: Iterable[Process], root: str = "/"
) -> tuple[TakenPort, ...]:
    """Listeners on these ports in the network namespace of the instance that no member owns. Never raises.

    Args:
        wanted: purpose -> port.
        host: the address that the instance will bind, where it is known; None or a name stand for every address.
        members: processes of the instance, the one that binds first.
        root: where /proc is looked up.
    """
    mine = {p.pid: p for p in members}
    if not wanted or not mine:
        return ()
    rows = _listeners(next(iter(mine)), root)
    suspects = [(what, row) for what, port in wanted.items() for row in rows if _collides(row, port, host)]
    if not suspects:
        return ()
    owners, _ = owners_of((row.inode for _, row in suspects), root)
    found = []
    for purpose, row in suspects:
        pids = tuple(owner.pid for owner in owners.get(row.inode, ()))
        if set(pids) & set(mine):
            continue
        found.append(
            TakenPort(
                port=wanted[purpose],
                purpose=purpose,
                address=row.local.rpartition(":")[0].strip("[]"),
                pids=pids,
                name=_comm(pids[0], root) if pids else "",
            )
        )
    return tuple(found)


def _listeners(pid: int, root: str) -> list[Row]:
    try:
        ours = root == "/" and netns_key(pid) == netns_key(os.getpid())
        table: SockDiag | ProcNet = SockDiag(None if ours else pid) if root == "/" else ProcNet(pid, root)
    except OSError:
        table = ProcNet(pid, root)
    try:
        return [row for row in table.rows() if row.state == "LISTEN" and row.family != "unix"]
    except OSError:
        return []
    finally:
        table.close()


def _collides(row: Row, port: int, host: str | None) -> bool:
    """Two listeners exclude each other on one port, unless each is bound to an address of its own."""
    address, _, number = row.local.rpartition(":")
    if number != str(port):
        return False
    theirs, ours = _ip(address.strip("[]")), _ip(host or "")
    return theirs is None or ours is None or theirs.is_unspecified or ours.is_unspecified or theirs == ours


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _comm(pid: int, root: str) -> str:
    try:
        found = parse_stat(procfs.read(procfs.proc(root, pid, "stat")))
    except OSError:
        return ""
    return found.comm if found is not None else ""

"""The kernel's socket tables: sock_diag over netlink, and /proc/PID/net where netlink cannot be used.

sock_diag gives what /proc does not: the peer of a unix socket and its queues. It touches no socket and needs no
privilege in our own network namespace. Formats: linux/unix_diag.h, linux/inet_diag.h, linux/netlink.h, proc(5).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import procfs
from .netns import call_in_netns_of

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
UDIAG_SHOW = 1 | 4 | 8 | 16  # NAME, PEER, ICONS, RQLEN
UNIX_DIAG_NAME, UNIX_DIAG_PEER, UNIX_DIAG_ICONS, UNIX_DIAG_RQLEN = 0, 2, 3, 4
TIME_WAIT = 6

STATES = {
    1: "ESTAB", 2: "SYN-SENT", 3: "SYN-RECV", 4: "FIN-WAIT-1", 5: "FIN-WAIT-2", 6: "TIME-WAIT", 7: "UNCONN",
    8: "CLOSE-WAIT", 9: "LAST-ACK", 10: "LISTEN", 11: "CLOSING", 12: "SYN-RECV", 13: "UNCONN",
}  # fmt: skip
"""Names as `ss` prints them, by the kernel's number (net/tcp_states.h)."""

REPLY_TIMEOUT_S = 2.0

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_PAIR = struct.Struct("=II")
_UNIX_MESSAGE = struct.Struct("=BBBxI8x")
_INET_MESSAGE = struct.Struct("=BBxx2s2s16s16s12xIIIII")


class Row(NamedTuple):
    """One socket as one dump shows it. Queues are bytes; for a listener (not yet accepted, backlog). None: not told."""

    family: str
    inode: int
    state: str
    local: str
    remote: str = ""
    peer_inode: int | None = None
    recv_q: int | None = None
    send_q: int | None = None
    pending_inodes: tuple[int, ...] = ()


class SockDiag:
    """A netlink socket that stays in the network namespace it was opened in. Close it after use.

    Args:
        pid: open it in the network namespace of this process instead of our own.

    Raises:
        OSError: no such process, setns not permitted, or a kernel without sock_diag.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._socket = _open() if pid is None else call_in_netns_of(pid, _open)
        self._sequence = 0

    def rows(self) -> Iterator[Row]:
        """Every unix and TCP socket of the namespace, TIME-WAIT apart (no owner, no queue, and there may be thousands).

        Raises:
            OSError: the kernel refuses (for example unix_diag is not built in), does not answer, or answers what it
                does not document (EBADMSG).
        """
        yield from self._dump(
            struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, UDIAG_SHOW, 0, 0), _unix_row
        )
        for family in (socket.AF_INET, socket.AF_INET6):
            states = 0xFFFFFFFF & ~(1 << TIME_WAIT)
            yield from self._dump(struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 0, states), _inet_row)

    def _dump(self, request: bytes, read: Callable[[bytes], Row]) -> list[Row]:
        # To the end before anything is given out: while a dump is under way the kernel answers another one with EBUSY.
        found: list[Row] = []
        self._sequence += 1
        length = _HEADER.size + len(request)
        self._socket.send(_HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, self._sequence, 0) + request)
        while True:
            for kind, sequence, payload in messages(self._socket.recv(1 << 18)):
                if sequence != self._sequence:
                    continue  # the rest of an earlier dump that was given up
                if kind == NLMSG_DONE:
                    return found
                if kind == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", payload)[0] if len(payload) >= 4 else 0
                    raise OSError(number, f"sock_diag: {os.strerror(number)}")
                found.append(read(payload))

    def close(self) -> None:
        """Close the netlink socket."""
        self._socket.close()


def _open() -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
    netlink.settimeout(REPLY_TIMEOUT_S)
    return netlink


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Split a netlink datagram into (type, sequence, payload). Raises OSError where a length is impossible."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size or at + length > len(data):
            raise OSError(errno.EBADMSG, f"netlink answer cut short: a message of {length} bytes in {len(data) - at}")
        yield kind, sequence, data[at + _HEADER.size : at + length]
        at += length + 3 & ~3


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Split netlink attributes into (type, value); stops at the first that is not sound."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size or at + length > len(data):
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3


def _unix_row(payload: bytes) -> Row:
    if len(payload) < _UNIX_MESSAGE.size:
        raise OSError(errno.EBADMSG, f"netlink answer cut short: {len(payload)} bytes for a unix socket")
    _, _, state, inode = _UNIX_MESSAGE.unpack_from(payload)
    local, peer, queues, pending = "", None, (None, None), ()
    for kind, value in attributes(payload[_UNIX_MESSAGE.size :]):
        if kind == UNIX_DIAG_NAME:
            local = _unix_name(value)
        elif kind == UNIX_DIAG_PEER and len(value) == 4:
            peer = struct.unpack("=I", value)[0]
        elif kind == UNIX_DIAG_RQLEN and len(value) == _PAIR.size:
            queues = _PAIR.unpack(value)
        elif kind == UNIX_DIAG_ICONS and len(value) % 4 == 0:
            pending = struct.unpack(f"={len(value) // 4}I", value)
    # A peer of 0 is the end that the listener has not accepted yet: it has no inode.
    return Row("unix", inode, STATES.get(state, str(state)), local, "", peer or None, *queues, pending)


def _unix_name(value: bytes) -> str:
    name = "@" + value[1:].decode(errors="backslashreplace") if value[:1] == b"\0" else os.fsdecode(value)
    return name.rstrip("\0").encode(errors="backslashreplace").decode()


def _inet_row(payload: bytes) -> Row:
    if len(payload) < _INET_MESSAGE.size:
        raise OSError(errno.EBADMSG, f"netlink answer cut short: {len(payload)} bytes for a TCP socket")
    family, state, sport, dport, source, destination, _, recv_q, send_q, _, inode = _INET_MESSAGE.unpack_from(payload)
    v6 = family == socket.AF_INET6
    local, remote = _address(source, sport, v6), _address(destination, dport, v6)
    return Row("tcp6" if v6 else "tcp", inode, STATES.get(state, str(state)), local, remote, None, recv_q, send_q)


def _address(address: bytes, port: bytes, v6: bool) -> str:
    """``1.2.3.4:80`` or ``[::1]:80``; empty for port 0, the remote end of a listener.

    An IPv4 address in IPv6 clothes is written plain, so that both ends of a connection compare.
    """
    number = int.from_bytes(port, "big")
    if not number:
        return ""
    if not v6:
        return f"{socket.inet_ntop(socket.AF_INET, address[:4])}:{number}"
    if address[:12] == b"\0" * 10 + b"\xff\xff":
        return f"{socket.inet_ntop(socket.AF_INET, address[12:16])}:{number}"
    return f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{number}"


class ProcNet:
    """The same tables out of /proc/PID/net, which everybody may read: no unix peers, no unix queues, no TCP backlog."""

    def __init__(self, pid: int, root: str = "/") -> None:
        self._directory = procfs.proc(root, pid, "net")

    def rows(self) -> Iterator[Row]:
        """Every unix and TCP socket of the namespace, TIME-WAIT apart.

        Raises:
            OSError: the process is gone.
        """
        for line in self._lines("unix"):
            row = unix_line(line)
            if row:
                yield row
        for family in ("tcp", "tcp6"):
            for line in self._lines(family):
                row = inet_line(line, family)
                if row and row.state != "TIME-WAIT":
                    yield row

    def _lines(self, name: str) -> list[str]:
        try:
            return procfs.read(f"{self._directory}/{name}").decode(errors="backslashreplace").split("\n")[1:]
        except FileNotFoundError:
            if name == "tcp6" and os.path.exists(self._directory):
                return []  # a kernel booted without IPv6
            raise

    def close(self) -> None:
        """Nothing is held open."""


def unix_line(line: str) -> Row | None:
    """A line of /proc/net/unix; None where it is none, or shows the inodeless end of a connection not yet accepted."""
    fields = line.split(maxsplit=7)
    try:
        flags, state, inode = int(fields[3], 16), int(fields[5], 16), int(fields[6])
    except (IndexError, ValueError):
        return None
    if not inode:
        return None
    accepts = flags & 0x10000  # __SO_ACCEPTCON
    name = "LISTEN" if accepts else {1: "UNCONN", 2: "SYN-SENT", 3: "ESTAB"}.get(state, str(state))
    return Row("unix", inode, name, fields[7].strip() if len(fields) > 7 else "")


def inet_line(line: str, family: str) -> Row | None:
    """A line of /proc/net/tcp or tcp6; None where it is none."""
    fields = line.split()
    try:
        state, queues, inode = int(fields[3], 16), fields[4].split(":"), int(fields[9])
        local, remote = _hex_address(fields[1]), _hex_address(fields[2])
        send_q, recv_q = int(queues[0], 16), int(queues[1], 16)
    except (IndexError, ValueError):
        return None
    name = STATES.get(state, str(state))
    return Row(family, inode, name, local, remote, None, recv_q, None if name == "LISTEN" else send_q)


def _hex_address(text: str) -> str:
    # The address is printed as 32-bit words in the byte order of the machine.
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    if len(words) not in (1, 4):
        raise ValueError(text)
    return _address(struct.pack(f"={len(words)}I", *words), int(port, 16).to_bytes(2, "big"), len(words) == 4)

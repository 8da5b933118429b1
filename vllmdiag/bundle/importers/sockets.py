"""Socket tables: ss (TCP and unix, with -p, -e and -i) and netstat."""

from __future__ import annotations

import re
from typing import Any

from vllmdiag.bundle.draft import Draft, SocketDraft

from .format import Context, Format, Reader

_STATES = "LISTEN|ESTAB|SYN-SENT|SYN-RECV|FIN-WAIT-1|FIN-WAIT-2|TIME-WAIT|CLOSE-WAIT|LAST-ACK|CLOSING|UNCONN|CLOSED?"
_ADDRESS = r"(?:\[[0-9a-fA-F:.%\w]*\]|\*|[\w.:%-]*?|[0-9.]+(?:%\w+)?):(?:\*|\d+|[a-z][\w-]*)"
_TCP = re.compile(
    rf"^\s*(?:(?P<net>tcp6?|udp6?)\s+)?(?P<state>{_STATES})\s+(?P<recv>\d+)\s+(?P<send>\d+)\s+(?P<local>{_ADDRESS})\s+(?P<remote>{_ADDRESS})(?P<rest>\s.*)?$"
)
_UNIX = re.compile(
    rf"^\s*(?:(?P<kind>u_(?:str|dgr|seq))\s+)(?P<state>{_STATES})\s+(?P<recv>\d+)\s+(?P<send>\d+)\s+(?P<path>\S+)\s+(?P<inode>\d+)\s+(?P<peer>\S+)\s+(?P<peer_inode>\d+)(?P<rest>\s.*)?$"
)
_HEAD = re.compile(r"^\s*(?:Netid\s+)?State\s+Recv-Q\s+Send-Q\s+Local Address", re.IGNORECASE)
_NETSTAT_HEAD = re.compile(r"^\s*(?:Active (?:Internet|UNIX)|Proto\s+(?:Recv-Q|RefCnt))")
_NETSTAT = re.compile(
    rf"^\s*(?P<net>tcp6?|udp6?)\s+(?P<recv>\d+)\s+(?P<send>\d+)\s+(?P<local>{_ADDRESS})\s+(?P<remote>{_ADDRESS})\s+(?P<state>[A-Z_0-9]+)(?P<rest>\s.*)?$"
)
_NETSTAT_UNIX = re.compile(
    r"^\s*unix\s+\d+\s+\[[^\]]*\]\s+\w+\s+(?P<state>[A-Z]+)?\s+(?P<inode>\d+)\s+(?:(?P<pid>\d+)/\S+|-)?\s*(?P<path>[/@]\S+)?\s*$"
)
_UDP = re.compile(rf"^\s*udp6?\s+(?:\w+\s+)?\d+\s+\d+\s+{_ADDRESS}\s+{_ADDRESS}")
_OWNER = re.compile(r'\("([^"]*)",pid=(\d+),fd=(\d+)\)')
_INODE = re.compile(r"\bino:(\d+)")
_DETAIL = re.compile(
    r"^\s*(?:#.*?)?(?:ss -\w*i\w*:?\s*)?.*\b(?:bytes_sent|bytes_acked|lastsnd|cwnd|rto|unacked|notsent):", re.IGNORECASE
)
_NETSTAT_STATES = {
    "ESTABLISHED": "ESTAB", "SYN_SENT": "SYN-SENT", "SYN_RECV": "SYN-RECV", "FIN_WAIT1": "FIN-WAIT-1",
    "FIN_WAIT2": "FIN-WAIT-2", "TIME_WAIT": "TIME-WAIT", "CLOSE": "CLOSE", "CLOSE_WAIT": "CLOSE-WAIT",
    "LAST_ACK": "LAST-ACK", "CLOSING": "CLOSING", "LISTEN": "LISTEN", "LISTENING": "LISTEN", "CONNECTED": "ESTAB",
}  # fmt: skip


class _Sockets(Reader):
    """The rows of one table."""

    def __init__(self, context: Context, draft: Draft) -> None:
        self._context, self._draft = context, draft
        self._seen: dict[int, int] = {}
        """Socket of this table -> its look: one that stands there twice has two owners, not two looks."""

    def take(self, line: str) -> bool:
        if _HEAD.match(line) or _NETSTAT_HEAD.match(line):
            self._seen.clear()
            return True
        if not line.strip() or _UDP.match(line):
            return True
        found = _TCP.match(line)
        if found is not None:
            return self._tcp(found, found["state"])
        found = _UNIX.match(line)
        if found is not None:
            return self._unix(found)
        found = _NETSTAT.match(line)
        if found is not None and found["state"] in _NETSTAT_STATES:
            return self._tcp(found, _NETSTAT_STATES[found["state"]])
        found = _NETSTAT_UNIX.match(line)
        if found is not None:
            return self._netstat_unix(found)
        return bool(self._seen) and _DETAIL.match(line) is not None

    def _tcp(self, found: re.Match[str], state: str) -> bool:
        local, remote, rest = found["local"], found["remote"], found["rest"] or ""
        if (found["net"] or "tcp").startswith("udp"):
            return True
        family = "tcp6" if local.startswith("[") or found["net"] == "tcp6" else "tcp"
        inode = _INODE.search(rest)
        fields: dict[str, Any] = {
            "family": family,
            "local": _address(local),
            "remote": "" if remote.endswith(":*") else _address(remote),
            "inode": int(inode[1]) if inode else 0,
        }
        sock = self._draft.socket((self._context.node, family, local, remote), **fields)
        self._look(sock, state, found)
        self._owners(sock, rest)
        return True

    def _unix(self, found: re.Match[str]) -> bool:
        path = "" if found["path"] == "*" else found["path"]
        peer = int(found["peer_inode"])
        sock = self._draft.socket(
            (self._context.node, "unix", int(found["inode"])),
            family="unix",
            local=path,
            remote="" if found["peer"] == "*" else found["peer"],
            inode=int(found["inode"]),
            peer_inode=peer or None,
        )
        self._look(sock, found["state"], found)
        self._owners(sock, found["rest"] or "")
        return True

    def _netstat_unix(self, found: re.Match[str]) -> bool:
        sock = self._draft.socket(
            (self._context.node, "unix", int(found["inode"])),
            family="unix",
            local=found["path"] or "",
            inode=int(found["inode"]),
            state=_NETSTAT_STATES.get(found["state"] or "", "UNCONN"),
        )
        if found["pid"]:
            sock.owners[self._draft.pid(int(found["pid"]), self._context)] = ()
        return True

    def _look(self, sock: SocketDraft, state: str, found: re.Match[str]) -> None:
        look = self._seen.get(id(sock), self._context.look)
        while id(sock) not in self._seen and look in sock.looks:
            look += 1
        self._seen[id(sock)] = look
        sock.looks[look] = {"recv_q": int(found["recv"]), "send_q": int(found["send"]), "state": state}

    def _owners(self, sock: SocketDraft, rest: str) -> None:
        for name, word, fd in _OWNER.findall(rest):
            pid = self._draft.pid(int(word), self._context)
            sock.owners[pid] = tuple(dict.fromkeys((*sock.owners.get(pid, ()), int(fd))))
            self._named(int(word), name)
        netstat = re.match(r"\s+(?:\S+\s+\d+\s+)?(\d+)/(\S+)", rest)
        if netstat is not None:
            sock.owners[self._draft.pid(int(netstat[1]), self._context)] = ()
            self._named(int(netstat[1]), netstat[2].rstrip(":"))

    def _named(self, pid: int, name: str) -> None:
        """The table tells the kernel's name of the owner: enough to know VLLM::EngineCor by."""
        self._draft.process(pid, self._context).facts.setdefault("comm", name[:15])


_ANY = "0.0.0.0"  # noqa: S104  how a listener on every address is written


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    host = re.sub(r"%\w+", "", host)
    return f"{_ANY if host == '*' else host}:{port}"


def _opens(line: str, _context: Context) -> bool:
    if _HEAD.match(line) or _NETSTAT_HEAD.match(line):
        return True
    return any(rule.match(line) for rule in (_TCP, _UNIX, _NETSTAT, _NETSTAT_UNIX))


def _reader(context: Context, draft: Draft) -> Reader:
    return _Sockets(context, draft)


FORMATS = (Format(name="socket table", opens=_opens, reader=_reader, names=("ss", "netstat", "sockets")),)

"""Several nodes in one snapshot: pids, inodes and loopback addresses of each moved out of the others' way, and back.

A pid is unique on its node alone. In a merged snapshot node k has its pids at ``(k + 1) * 10_000_000`` and up, beyond
any pid of Linux, so that the number in a line of evidence or a command still tells which node it is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis, Finding, Link, NextStep, Subject, Verdict
from vllmdiag.model.logs import LogDigest, LogEvent
from vllmdiag.model.process import Process
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import KernelLine, Snapshot
from vllmdiag.model.sockets import Socket

_STRIDE = 10_000_000
_INODES = 1 << 48
_STARTS = 1 << 44
"""Start times are clock ticks after boot: apart by this much the order of nodes comes before the order of start."""
_NUMBER = re.compile(r"\d+")
_GLOBAL = re.compile(r"\b[1-9]\d{7,}\b")
_LOOPBACK = re.compile(r"^(\[::ffff:)?127\.\d+\.\d+\.\d+(\]?:\d+)$")

T = TypeVar("T", bound=msgspec.Struct)


def _with(value: T, **fields: object) -> T:
    return msgspec.structs.replace(value, **fields)


@dataclass(frozen=True)
class Moved:
    """A merged snapshot and the way back."""

    snapshot: Snapshot
    origin: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Pid in the merged snapshot -> (node, pid there)."""

    def back(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis with every subject on its node, pids as they are there."""
        return _with(
            diagnosis,
            verdict=self._verdict(diagnosis.verdict),
            findings=tuple(self._finding(f) for f in diagnosis.findings),
            missing=tuple(self._missing(m) for m in diagnosis.missing),
        )

    def _verdict(self, verdict: Verdict) -> Verdict:
        return _with(verdict, **self._told(verdict))

    def _finding(self, finding: Finding) -> Finding:
        return _with(finding, **self._told(finding))

    def _told(self, said: Verdict | Finding) -> dict[str, object]:
        return {
            "subject": self._subject(said.subject),
            "summary": self.text(said.summary),
            "evidence": tuple(map(self.text, said.evidence)),
            "chain": tuple(Link(subject=self._subject(c.subject), doing=self.text(c.doing)) for c in said.chain),
            "next": tuple(NextStep(command=self.text(s.command), why=s.why, risk=s.risk) for s in said.next),
        }

    def _subject(self, subject: Subject) -> Subject:
        node, pid = self.origin.get(subject.pid or 0, (subject.node, subject.pid))
        return _with(subject, node=node, pid=pid)

    def _missing(self, hole: Missing) -> Missing:
        return Missing(what=self.text(hole.what), why=hole.why, next=self.text(hole.next))

    def text(self, text: str) -> str:
        """The text with the pids that its reader knows."""
        return _GLOBAL.sub(lambda m: str(self.origin[int(m[0])][1]) if int(m[0]) in self.origin else m[0], text)


def merge(parts: Sequence[tuple[str, Snapshot]]) -> Moved:
    """One snapshot of several.

    Args:
        parts: (node, what was seen there) in the order of their ranks; at least one. The first is the head.
    """
    moved = [_Mover(k, snapshot).snapshot() for k, (_, snapshot) in enumerate(parts)]
    origin = {
        (k + 1) * _STRIDE + p.pid: (node, p.pid) for k, (node, snapshot) in enumerate(parts) for p in snapshot.processes
    }
    head = moved[0]
    joined: dict[str, object] = {name: tuple(item for one in moved for item in getattr(one, name)) for name in _LISTS}
    merged = _with(
        head, observed_at=max(s.observed_at for s in moved), window_s=max(s.window_s for s in moved), **joined
    )
    return Moved(merged, origin)


_LISTS = (
    "target_pids",
    "processes",
    "segments",
    "shm_mounts",
    "sockets",
    "zmtp",
    "http",
    "metrics",
    "kernel_lines",
    "log_lines",
    "logs",
    "locks",
    "networks",
    "taken_ports",
    "ipc_paths_missing",
    "missing",
    "costs",
)
"""What is simply put together. Devices, NCCL's reports and flight records stay those of the head: their numbers count
from 0 on every node, and what they say of one node alone is judged node by node."""


@dataclass(frozen=True)
class _Mover:
    """One node's snapshot on its way into the merged one."""

    k: int
    seen: Snapshot

    def snapshot(self) -> Snapshot:
        seen = self.seen
        return _with(
            seen,
            target_pids=self.pids(seen.target_pids),
            processes=tuple(map(self.process, seen.processes)),
            segments=tuple(map(self.segment, seen.segments)),
            shm_mounts=tuple(_with(m, mnt_ns=self.inode(m.mnt_ns), pids=self.pids(m.pids)) for m in seen.shm_mounts),
            sockets=tuple(map(self.socket, seen.sockets)),
            zmtp=tuple(_with(z, inode=self.inode(z.inode), owner=self.maybe(z.owner)) for z in seen.zmtp),
            kernel_lines=tuple(map(self.kernel_line, seen.kernel_lines)),
            logs=tuple(map(self.log, seen.logs)),
            locks=tuple(
                _with(lock, holder=self.maybe(lock.holder), waiters=self.pids(lock.waiters)) for lock in seen.locks
            ),
            networks=tuple(_with(n, netns=self.inode(n.netns), pids=self.pids(n.pids)) for n in seen.networks),
            taken_ports=tuple(_with(t, pids=self.pids(t.pids)) for t in seen.taken_ports),
            missing=tuple(Missing(what=self.words(m.what), why=m.why, next=m.next) for m in seen.missing),
        )

    @cached_property
    def here(self) -> frozenset[int]:
        return frozenset(p.pid for p in self.seen.processes)

    def pid(self, pid: int) -> int:
        """0 and an init that was not seen stay what they are: nobody's parent."""
        return pid if pid <= 0 or (pid == 1 and not self.init) else (self.k + 1) * _STRIDE + pid

    @cached_property
    def init(self) -> bool:
        return 1 in self.here

    def pids(self, pids: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.pid(pid) for pid in pids)

    def maybe(self, pid: int | None) -> int | None:
        return None if pid is None else self.pid(pid)

    def inode(self, inode: int) -> int:
        return inode and inode + (self.k + 1) * _INODES

    def process(self, process: Process) -> Process:
        namespaces = process.namespaces
        if namespaces is not None and not isinstance(namespaces, Missing):
            fields = namespaces.__struct_fields__
            namespaces = _with(namespaces, **{name: self.inode(getattr(namespaces, name)) for name in fields})
        return _with(
            process,
            pid=self.pid(process.pid),
            starttime=process.starttime + self.k * _STARTS,
            ppid=self.pid(process.ppid),
            pgid=self.pid(process.pgid),
            sid=self.pid(process.sid),
            tracer_pid=self.pid(process.tracer_pid),
            threads=tuple(_with(t, tid=self.pid(t.tid)) for t in process.threads),
            stacks=tuple(
                d
                if isinstance(d.threads, Missing)
                else _with(d, threads=tuple(_with(t, tid=self.maybe(t.tid)) for t in d.threads))
                for d in process.stacks
            ),
            namespaces=namespaces,
            shm_fds=process.shm_fds
            if isinstance(process.shm_fds, Missing)
            else tuple(_with(f, dev=self.inode(f.dev)) for f in process.shm_fds),
            socket_inodes=process.socket_inodes
            if isinstance(process.socket_inodes, Missing)
            else tuple(map(self.inode, process.socket_inodes)),
            missing=tuple(Missing(what=self.words(m.what), why=m.why, next=m.next) for m in process.missing),
        )

    def segment(self, segment: Segment) -> Segment:
        holders = tuple(_with(h, pid=self.pid(h.pid)) for h in segment.holders)
        return _with(segment, dev=self.inode(segment.dev), holders=holders)

    def socket(self, socket: Socket) -> Socket:
        return _with(
            socket,
            inode=self.inode(socket.inode),
            netns=self.inode(socket.netns),
            local=self.address(socket.local),
            remote=self.address(socket.remote),
            peer_inode=socket.peer_inode and self.inode(socket.peer_inode),
            owners=tuple(_with(o, pid=self.pid(o.pid)) for o in socket.owners),
            pending_inodes=tuple(map(self.inode, socket.pending_inodes)),
        )

    def address(self, address: str) -> str:
        """Loopback of one node is not that of another: each gets a part of 127/8 of its own."""
        found = _LOOPBACK.match(address)
        if found is None or not self.k:
            return address
        return f"{found[1] or ''}127.{64 + self.k // 250}.{self.k % 250 + 1}.1{found[2]}"

    def kernel_line(self, line: KernelLine) -> KernelLine:
        return _with(line, text=self.words(line.text))

    def log(self, digest: LogDigest) -> LogDigest:
        def event(one: LogEvent) -> LogEvent:
            return _with(one, pid=self.maybe(one.pid))

        return _with(
            digest,
            first_error=event(digest.first_error) if digest.first_error is not None else None,
            echoes=tuple(map(event, digest.echoes)),
            other_errors=tuple(map(event, digest.other_errors)),
            phases=tuple(map(event, digest.phases)),
            rings=tuple(_with(ring, pid=self.maybe(ring.pid)) for ring in digest.rings),
        )

    def words(self, text: str) -> str:
        """A text in which pids of this node's processes stand."""
        here = self.here
        return _NUMBER.sub(lambda m: str(self.pid(int(m[0]))) if int(m[0]) in here else m[0], text)

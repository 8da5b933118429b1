"""A Snapshot in the making: importers of pasted evidence fill it piece by piece, `finish` turns it into the value.

Evidence comes in any order and in parts: a stack here, a row of `ps` there, a second scrape in another file. So every
process is gathered by its pid, every sample by its look (0 for the first, 1 for the second ...), and what nobody has
said stays unsaid: a fact that is absent here was not given, which is not the same as not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.http import MetricsScrape
from vllmdiag.model.process import Process, ProcessSample, StackDump, Thread, ThreadSample, ThreadStack
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import Node, Snapshot
from vllmdiag.model.sockets import Socket, SocketOwner, SocketSample

from .importers.format import Context

UNKNOWN_STATE = "?"
"""State of a process of which only other things were told; empty would mean that it was gone."""
APART_S = 10.0
"""Seconds between two looks where the evidence does not tell."""
_PIDS = 1 << 22
"""More than the kernel's largest pid: two machines that use the same pid are kept apart by it."""


@dataclass
class ProcessDraft:
    """What was said of one process so far."""

    pid: int
    node: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of `Process` that have one value: cmdline, comm, ppid, environ, limits ..."""
    samples: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Look -> fields of `ProcessSample`."""
    threads: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """Thread id -> look -> fields of `ThreadSample`, and ``name``, ``wchan``."""
    dumps: dict[int, list[ThreadStack] | Missing] = field(default_factory=dict)
    """Look -> threads of a dump."""

    def sample(self, look: int, **fields: Any) -> None:
        """Facts of one look: ``state="S"``, ``utime=3.2`` ..."""
        self.samples.setdefault(look, {}).update(fields)

    def thread(self, tid: int, look: int, **fields: Any) -> None:
        """Facts of one thread in one look."""
        self.threads.setdefault(tid, {}).setdefault(look, {}).update(fields)

    def dump(self, look: int, threads: list[ThreadStack] | Missing) -> int:
        """Add a dump; the same look again is a later look. Returns the look it counts as."""
        while look in self.dumps:
            look += 1
        self.dumps[look] = threads
        return look

    def environ(self, name: str, value: str) -> None:
        """A variable. The caller has made sure that it may be kept."""
        self.facts.setdefault("environ", {})[name] = value

    def append(self, name: str, *values: Any) -> None:
        """Add to a fact that is a tuple, each value once."""
        self.facts[name] = tuple(dict.fromkeys((*self.facts.get(name, ()), *values)))


@dataclass
class SocketDraft:
    """What was said of one socket so far."""

    fields: dict[str, Any]
    owners: dict[int, tuple[int, ...]] = field(default_factory=dict)
    looks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Look -> fields of `SocketSample`."""


class Draft:
    """The snapshot so far. `lists` holds the tuple fields of `Snapshot` that importers fill directly."""

    def __init__(self) -> None:
        self.processes: dict[int, ProcessDraft] = {}
        self.sockets: dict[object, SocketDraft] = {}
        self.segments: dict[str, Segment] = {}
        self.lists: dict[str, list[Any]] = {}
        self.node: dict[str, Any] = {}
        """Fields of `Node`."""
        self.apart_s: float | None = None
        """Seconds between two looks, where the evidence tells."""
        self.scrapes: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        """(port, look) -> values of /metrics."""
        self.understood: dict[str, int] = {}
        """Format -> sections read."""
        self._pids: dict[tuple[str, int], int] = {}
        self._missing: dict[Missing, None] = {}

    def pid(self, pid: int, context: Context) -> int:
        """The pid under which a process stands in the snapshot: its own, unless another machine has used it."""
        key = (context.node, pid)
        if key not in self._pids:
            taken = sum(1 for _, other in self._pids if other == pid)
            self._pids[key] = pid + taken * _PIDS
        return self._pids[key]

    def process(self, pid: int, context: Context) -> ProcessDraft:
        """The process with that pid, made where it is new."""
        own = self.pid(pid, context)
        return self.processes.setdefault(own, ProcessDraft(pid=own, node=context.node))

    def socket(self, key: object, **fields: Any) -> SocketDraft:
        """The socket with that identity (inode, or both addresses), made where it is new."""
        found = self.sockets.setdefault(key, SocketDraft(fields={}))
        found.fields.update(fields)
        return found

    def add(self, name: str, *values: Any) -> None:
        """Append to a tuple field of the snapshot: ``accelerators``, ``ras``, ``kernel_lines``, ``log_lines`` ..."""
        self.lists.setdefault(name, []).extend(values)

    def missing(self, what: str, why: str, next: str) -> None:
        """A hole, each once: a part that was damaged, or that was not understood."""
        self._missing.setdefault(Missing(what=what, why=why, next=next))

    def target(self) -> ProcessDraft | None:
        """The process that evidence without a pid is of: the only one, where there is only one."""
        return next(iter(self.processes.values())) if len(self.processes) == 1 else None

    @property
    def empty(self) -> bool:
        """Nothing that can be judged."""
        return not (self.processes or self.sockets or self.segments or self.scrapes or any(self.lists.values()))

    def finish(self) -> Snapshot:
        """The snapshot. What was never said stays at its default, with a hole in `missing` for what the judge needs."""
        from .gaps import gaps

        apart = self.apart_s if self.apart_s is not None else APART_S
        last = max(self._looks(), default=0)
        lists = {name: tuple(values) for name, values in self.lists.items()}
        holes = lists.pop("missing", ())
        snapshot = Snapshot(
            pasted=True,
            window_s=last * apart,
            node=Node(**self.node),
            processes=tuple(self._process(p, apart) for _, p in sorted(self.processes.items())),
            sockets=tuple(_socket(s, apart) for s in self.sockets.values()),
            segments=tuple(self.segments.values()),
            metrics=tuple(
                MetricsScrape(t=look * apart, port=port, values=values)
                for (port, look), values in sorted(self.scrapes.items())
            ),
        )
        snapshot = msgspec.structs.replace(snapshot, **lists)
        given = (*self._missing, *holes)
        return msgspec.structs.replace(snapshot, missing=(*given, *gaps(snapshot, told_apart=self.apart_s is not None)))

    def _looks(self) -> list[int]:
        found = [look for p in self.processes.values() for look in (*p.samples, *p.dumps)]
        found += [look for p in self.processes.values() for looks in p.threads.values() for look in looks]
        found += [look for s in self.sockets.values() for look in s.looks]
        return found + [look for _, look in self.scrapes]

    def _process(self, draft: ProcessDraft, apart: float) -> Process:
        ppid = draft.facts.get("ppid", 0)
        facts = {name: value for name, value in draft.facts.items() if value is not None}
        return Process(
            **{
                "pid": draft.pid,
                "node": draft.node,
                "parent_unseen": ppid not in self.processes and ppid != 1,
                **facts,
                "samples": tuple(
                    ProcessSample(t=look * apart, **{"state": UNKNOWN_STATE, **fields})
                    for look, fields in _carried(draft.samples)
                ),
                "threads": tuple(_thread(tid, looks, apart) for tid, looks in sorted(draft.threads.items())),
                "stacks": tuple(
                    StackDump(t=look * apart, threads=found if isinstance(found, Missing) else tuple(found))
                    for look, found in sorted(draft.dumps.items())
                ),
            }
        )


def _carried(samples: dict[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Looks in order; what one does not tell is taken from the one before it (or the first that does).

    One look may come of `ps` and tell a state, the next of /proc/PID/io and tell bytes: neither denies the other.
    """
    ordered = sorted(samples.items())
    known: dict[str, Any] = {}
    for _, fields in reversed(ordered):
        known = {**known, **fields}
    found = []
    for look, fields in ordered:
        known = {**known, **fields}
        found.append((look, known))
    return found


def _thread(tid: int, looks: dict[int, dict[str, Any]], apart: float) -> Thread:
    named = [fields for fields in looks.values() if fields.get("name")]
    slept = [fields["wchan"] for fields in looks.values() if fields.get("wchan")]
    return Thread(
        tid=tid,
        name=named[-1]["name"] if named else "",
        wchan=slept[-1] if slept else "",
        samples=tuple(
            ThreadSample(
                t=look * apart,
                state=fields.get("state", ""),
                utime=fields.get("utime", 0.0),
                stime=fields.get("stime", 0.0),
            )
            for look, fields in sorted(looks.items())
            if "state" in fields
        ),
    )


def _socket(draft: SocketDraft, apart: float) -> Socket:
    samples = tuple(SocketSample(t=look * apart, **fields) for look, fields in sorted(draft.looks.items()))
    return Socket(
        **{
            "recv_q": samples[-1].recv_q if samples else None,
            "send_q": samples[-1].send_q if samples else None,
            "state": samples[-1].state if samples else "",
            **draft.fields,
        },
        owners=tuple(SocketOwner(pid=pid, fds=fds) for pid, fds in draft.owners.items()),
        samples=samples,
    )

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
from vllmdiag.model.process import Cgroup, Process, ProcessSample, StackDump, Thread, ThreadSample, ThreadStack
from vllmdiag.model.shm import Holder, RingClaim, Segment, ShmMount, TailState
from vllmdiag.model.snapshot import Node, Snapshot
from vllmdiag.model.sockets import Socket, SocketOwner, SocketSample
from vllmdiag.model.startup import Interface, Network

from .gpu_draft import GpuDraft
from .importers.format import Context
from .relations import NOBODY, relate

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
    in_table: bool = False
    """A process table has a row of it."""
    cgroup: dict[str, Any] = field(default_factory=dict)
    """Fields of `Cgroup`."""
    _looked: dict[str, int] = field(default_factory=dict)

    def sample(self, look: int, **fields: Any) -> None:
        """Facts of one look: ``state="S"``, ``utime=3.2`` ..."""
        self.samples.setdefault(look, {}).update(fields)

    def next_look(self, kind: str, look: int) -> int:
        """The look that one more reading of a kind counts as: a file that is pasted twice shows motion."""
        self._looked[kind] = max(look, self._looked.get(kind, -1) + 1)
        return self._looked[kind]

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


@dataclass
class FileDraft:
    """What was said of one file of /dev/shm so far."""

    fields: dict[str, Any] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    claim: RingClaim | None = None
    looks: dict[int, bytes] = field(default_factory=dict)
    """Look -> flags of the ring."""


class Draft:
    """The snapshot so far. `lists` holds the tuple fields of `Snapshot` that importers fill directly."""

    def __init__(self) -> None:
        self.processes: dict[int, ProcessDraft] = {}
        self.sockets: dict[object, SocketDraft] = {}
        self.files: dict[str, FileDraft] = {}
        """Files of /dev/shm by name."""
        self.holders_told = False
        """Somebody has said who holds which of them: one that was left out has no holder."""
        self.lists: dict[str, list[Any]] = {}
        self.single: dict[str, Any] = {}
        """Fields of `Snapshot` that hold one value, such as ``ray``."""
        self.node: dict[str, Any] = {}
        """Fields of `Node`."""
        self.version = ""
        """vLLM's version, where the evidence says it."""
        self.apart_s: float | None = None
        """Seconds between two looks, where the evidence tells."""
        self.scrapes: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        """(port, look) -> values of /metrics."""
        self.understood: dict[str, int] = {}
        """Format -> sections read."""
        self.gpu = GpuDraft()
        """GPUs, of which several pieces tell a part each."""
        self._pids: dict[int, list[str]] = {}
        """Pid -> machines that use it, in the order in which they came."""
        self._networks: dict[str, tuple[list[Interface], list[int]]] = {}
        self._mounts: dict[str, dict[str, Any]] = {}
        self._missing: dict[Missing, None] = {}

    def pid(self, pid: int, context: Context) -> int:
        """The pid under which a process stands in the snapshot: its own, unless another machine has used it."""
        users = self._pids.setdefault(pid, [])
        for place, node in enumerate(users):
            if node == context.node or (not context.node_of_file and not (node and context.node)):
                users[place] = node or context.node
                return pid + place * _PIDS
        users.append(context.node)
        return pid + (len(users) - 1) * _PIDS

    def process(self, pid: int, context: Context) -> ProcessDraft:
        """The process with that pid, made where it is new."""
        found = self.known(self.pid(pid, context))
        found.node = found.node or context.node
        return found

    def known(self, pid: int) -> ProcessDraft:
        """The process with that pid of the snapshot, made where it is new."""
        return self.processes.setdefault(pid, ProcessDraft(pid=pid))

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

    def subject(self, context: Context) -> ProcessDraft:
        """The process that a section is of. Where nothing names it, one without a pid stands for the server."""
        return self.process(context.pid if context.pid is not None else NOBODY, context)

    def scrape(self, port: int, values: dict[str, dict[str, float]], context: Context) -> None:
        """One scrape of /metrics; the same look again is a later look."""
        look = context.look
        while (port, look) in self.scrapes:
            look += 1
        self.scrapes[port, look] = values

    def file(self, name: str, **fields: Any) -> FileDraft:
        """A file of /dev/shm; fields of `Segment` that are None say nothing."""
        found = self.files.setdefault(name.rpartition("/")[2], FileDraft())
        found.fields.update({key: value for key, value in fields.items() if value is not None})
        return found

    def ring(self, name: str, claim: RingClaim, flags: bytes, context: Context) -> None:
        """The flags of a ring as somebody has written them down; the same look again is a later look."""
        found = self.file(name)
        found.claim = claim
        look = context.look
        while look in found.looks:
            look += 1
        found.looks[look] = flags
        for pid in (claim.writer, *claim.readers):
            if pid is not None:
                self.holder(name, pid)

    def holder(self, path: str, pid: int, fd: int | None = None, mapped: bool | None = None) -> None:
        """A process that has a file of /dev/shm open or mapped."""
        holders = self.file(path).holders
        known = holders.get(pid, Holder(pid=pid))
        holders[pid] = Holder(
            pid=pid,
            fds=known.fds if fd is None or fd in known.fds else (*known.fds, fd),
            mapped=mapped if mapped is not None else known.mapped,
        )

    def mount(self, context: Context, **fields: Any) -> None:
        """What a process sees as /dev/shm: ``size``, ``free``, ``used`` in bytes."""
        found = self._mounts.setdefault(context.node, {"pids": []})
        found.update(fields)
        if context.pid is not None:
            found["pids"].append(self.process(context.pid, context).pid)

    def interfaces(self, context: Context, found: list[Interface]) -> None:
        """The network interfaces of a machine (or of the namespace of a process)."""
        pid = self.pid(context.pid, context) if context.pid is not None else None
        self._networks.setdefault(context.node, (found, []))[1].extend([pid] if pid is not None else [])

    @property
    def empty(self) -> bool:
        """Nothing that can be judged."""
        values = (
            *self.lists.values(),
            self.processes,
            self.sockets,
            self.files,
            self.scrapes,
            self._mounts,
            self._networks,
            self.node,
            self.single,
        )
        return not (any(values) or self.gpu.told)

    def finish(self) -> Snapshot:
        """The snapshot. What was never said stays at its default, with a hole in `missing` for what the judge needs."""
        from .gaps import gaps

        relate(self)
        apart = self.apart_s if self.apart_s is not None else APART_S
        last = max(self._looks(), default=0)
        lists = {name: tuple(values) for name, values in self.lists.items()}
        for name, values in self.gpu.lists(apart).items():
            lists[name] = (*lists.get(name, ()), *values)
        holes = lists.pop("missing", ())
        snapshot = Snapshot(
            pasted=True,
            window_s=last * apart,
            node=Node(**self.node),
            processes=tuple(self._process(p, apart) for _, p in sorted(self.processes.items())),
            sockets=tuple(_socket(s, apart) for s in self.sockets.values()),
            segments=tuple(_segment(n, name, f, self, apart) for n, (name, f) in enumerate(self.files.items(), 1)),
            shm_mounts=tuple(self._mount(node, fields) for node, fields in self._mounts.items()),
            networks=tuple(self._network(node, *found) for node, found in self._networks.items()),
            metrics=tuple(
                MetricsScrape(t=look * apart, port=port, values=values)
                for (port, look), values in sorted(self.scrapes.items())
            ),
        )
        snapshot = msgspec.structs.replace(snapshot, **lists, **self.single)
        given = (*self._missing, *holes)
        return msgspec.structs.replace(snapshot, missing=(*given, *gaps(snapshot, told_apart=self.apart_s is not None)))

    def _looks(self) -> list[int]:
        found = [look for p in self.processes.values() for look in (*p.samples, *p.dumps)]
        found += [look for p in self.processes.values() for looks in p.threads.values() for look in looks]
        found += [look for s in self.sockets.values() for look in s.looks]
        found += [look for f in self.files.values() for look in f.looks]
        return found + [look for _, look in self.scrapes]

    def _pids_on(self, node: str) -> tuple[int, ...]:
        """Processes of a machine; one of which nothing says where it runs may be of any."""
        return tuple(pid for pid, p in sorted(self.processes.items()) if not node or p.node in ("", node))

    def _mount(self, node: str, fields: dict[str, Any]) -> ShmMount:
        """Where nothing says whose /dev/shm it is, it is that of every process of the machine."""
        size = fields["size"]
        pids = tuple(dict.fromkeys(fields["pids"])) or self._pids_on(node)
        return ShmMount(mnt_ns=0, path="/dev/shm", size=size, free=fields.get("free", size), pids=pids)

    def _network(self, node: str, interfaces: list[Interface], pids: list[int]) -> Network:
        return Network(netns=0, pids=tuple(dict.fromkeys(pids)) or self._pids_on(node), interfaces=tuple(interfaces))

    def _process(self, draft: ProcessDraft, apart: float) -> Process:
        ppid = draft.facts.get("ppid", 0)
        facts = {name: value for name, value in draft.facts.items() if value is not None}
        return Process(
            **{
                "pid": draft.pid,
                "node": draft.node,
                "vllm_version": self.version or None,
                "parent_unseen": ppid not in self.processes and ppid != 1,
                **facts,
                "cgroup": Cgroup(**{"path": "", "version": 2, **draft.cgroup}) if draft.cgroup else None,
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


def _segment(number: int, name: str, file: FileDraft, draft: Draft, apart: float) -> Segment:
    claim, fields = file.claim, {key: value for key, value in file.fields.items() if key != "mtime"}
    if claim is not None:
        flags = claim.chunks * (1 + claim.n_readers)
        fields.setdefault("size", claim.chunks * claim.chunk_bytes + flags)
    first = min(file.looks, default=0)
    return Segment(
        **{"size": 0, **fields},
        path=f"/dev/shm/{name}",
        dev=0,
        ino=number,
        claim=claim,
        holders=tuple(file.holders.values()),
        holders_complete=draft.holders_told,
        tail_bytes=max((len(tail) for tail in file.looks.values()), default=0),
        polls=len(file.looks),
        polled_s=(max(file.looks, default=0) - first) * apart,
        states=tuple(TailState(t=look * apart, tail=tail) for look, tail in sorted(file.looks.items())),
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

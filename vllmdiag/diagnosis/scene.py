"""One instance of a snapshot, indexed: who is who, what each has, what the kernel says connects them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Subject
from vllmdiag.model.http import HttpProbe
from vllmdiag.model.process import Process
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.instances import Instance, Member, find_instances
from vllmdiag.vllm.serve_options import ServeOptions
from vllmdiag.vllm.titles import identify


@dataclass(frozen=True, eq=False)
class Scene:
    """The snapshot together with the instance that is judged."""

    snapshot: Snapshot
    instance: Instance
    others: tuple[Instance, ...] = ()

    @property
    def options(self) -> ServeOptions | None:
        """The arguments of `vllm serve`, where they could be read."""
        return self.instance.options

    @cached_property
    def version(self) -> str | None:
        """vLLM's version: what the server says, else what its files say."""
        for probe in self.probes:
            if probe.version:
                return probe.version
        return next((p.vllm_version for p in self.processes.values() if p.vllm_version), None)

    @cached_property
    def probes(self) -> tuple[HttpProbe, ...]:
        """What was asked of the server itself: an answer of a proxy says nothing of it."""
        return tuple(p for p in self.snapshot.http if not p.proxy)

    @cached_property
    def processes(self) -> dict[int, Process]:
        """Members by pid."""
        wanted = set(self.instance.pids)
        return {p.pid: p for p in self.snapshot.processes if p.pid in wanted}

    @cached_property
    def members(self) -> dict[int, Member]:
        """Members by pid."""
        return {m.pid: m for m in self.instance.members}

    @cached_property
    def engines(self) -> tuple[Member, ...]:
        """EngineCores in DP order."""
        return self.instance.of("EngineCore")

    @cached_property
    def servers(self) -> tuple[Member, ...]:
        """Processes that answer HTTP (not a launcher, not a script)."""
        return self.instance.of("APIServer")

    @cached_property
    def workers(self) -> tuple[Member, ...]:
        """All workers of this machine, in rank order."""
        return self.instance.of("Worker", "RayWorker")

    @cached_property
    def parents_unseen(self) -> bool:
        """Pasted evidence that does not show who stands above its topmost processes."""
        return any(self.processes[pid].parent_unseen for pid in self.instance.roots)

    def alive(self, member: Member) -> bool:
        """It had not died when the window ended."""
        return self.processes[member.pid].state not in ("", "Z", "X")

    def subject(self, pid: int) -> Subject:
        """The member as a subject of findings."""
        member = self.members.get(pid)
        if member is None:
            process = self.snapshot.process(pid)
            return Subject(role="Other", pid=pid, label=process.comm if process else f"pid {pid}")
        shown = pid if pid > 0 else None  # pasted evidence of a server whose pid it does not tell
        rank = self.node_rank(pid)
        node = self.processes[pid].node or (f"node {rank}" if rank is not None else None)
        return Subject(role=member.role, pid=shown, rank=member.ranks, label=member.label, node=node)

    def node_rank(self, pid: int) -> int | None:
        """Number of the node that a member runs on, by the arguments of the tree it hangs in; None in a job of one."""
        passed: set[int] = set()  # what somebody pasted need not be a tree
        while (member := self.members.get(pid)) is not None and member.parent_pid in self.members and pid not in passed:
            passed.add(pid)
            pid = member.parent_pid
        process = self.processes.get(pid)
        if process is None or isinstance(process.cmdline, Missing):
            return None
        known = identify(process.cmdline, process.comm)
        options = known.options if known is not None else None
        return options.node_rank if options is not None and options.nnodes > 1 else None

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments that a member holds."""
        mine = set(self.instance.pids)
        return tuple(s for s in self.snapshot.segments if any(h.pid in mine for h in s.holders))

    def holders(self, segment: Segment) -> frozenset[int]:
        """Members that hold the segment and are not mere helpers (a resource tracker keeps no descriptor)."""
        return frozenset(
            h.pid
            for h in segment.holders
            if (m := self.members.get(h.pid)) is not None and m.role not in ("Helper", "ResourceTracker")
        )

    @cached_property
    def sockets_by_inode(self) -> dict[int, Socket]:
        """Sockets that have an inode."""
        return {s.inode: s for s in self.snapshot.sockets if s.inode}

    @cached_property
    def listeners(self) -> tuple[Socket, ...]:
        """Listening sockets of members."""
        mine = set(self.instance.pids)
        return tuple(s for s in self.snapshot.sockets if s.state == "LISTEN" and mine & set(s.pids))

    @cached_property
    def ipc_peers(self) -> dict[str, tuple[int, frozenset[int]]]:
        """Bound unix path -> (the member that binds it, the members that are connected to it)."""
        bound: dict[str, int] = {}
        for listener in self.listeners:
            if listener.family == "unix" and listener.local and listener.pids:
                bound[listener.local] = listener.pids[0]
        connected: dict[str, set[int]] = defaultdict(set)
        for sock in self.snapshot.sockets:
            # The accepted end carries the path; the connecting end has none and is found by the inode of its peer.
            if sock.family == "unix" and sock.state != "LISTEN" and sock.local in bound and sock.peer_inode:
                peer = self.sockets_by_inode.get(sock.peer_inode)
                if peer is not None:
                    connected[sock.local].update(peer.pids)
        return {path: (pid, frozenset(connected[path] - {pid})) for path, pid in bound.items()}

    @cached_property
    def connected(self) -> frozenset[tuple[int, int]]:
        """Ordered pairs of members with an established connection (unix or TCP) between them, both ways listed."""
        pairs: set[tuple[int, int]] = set()
        by_ends = {(s.local, s.remote): s for s in self.snapshot.sockets if s.family != "unix" and s.state == "ESTAB"}
        for sock in self.snapshot.sockets:
            if sock.state == "LISTEN":
                continue
            if sock.family == "unix":
                peer = self.sockets_by_inode.get(sock.peer_inode or 0)
            else:
                peer = by_ends.get((sock.remote, sock.local))
            if peer is None:
                continue
            pairs.update((a, b) for a in sock.pids for b in peer.pids if a != b)
            pairs.update((b, a) for a in sock.pids for b in peer.pids if a != b)
        return frozenset(pairs)

    def sockets_known(self, pid: int) -> bool:
        """Its descriptors could be read, so an absent socket proves something."""
        process = self.processes.get(pid)
        return process is not None and not isinstance(process.socket_inodes, Missing) and bool(process.socket_inodes)

    @cached_property
    def http_ports(self) -> tuple[int, ...]:
        """TCP ports on which a server (or the launcher that shares its socket) answers or should answer HTTP."""
        ports = []
        if self.options is not None and not self.options.headless and self.instance.of("APIServer", "Launcher"):
            ports.append(self.options.port)
        return tuple(ports)

    def environ(self, name: str) -> str | None:
        """A setting as any member carries it (the API server's environment is the intact one)."""
        return next((p.environ[name] for p in self.processes.values() if name in p.environ), None)


def scene_of(snapshot: Snapshot) -> Scene | None:
    """The instance that the snapshot is about; None where it holds no vLLM process."""
    instances = find_instances(snapshot.processes)
    targets = set(snapshot.target_pids)
    chosen = [i for i in instances if targets & set(i.pids)] if targets else list(instances)
    if not chosen:
        return None
    instance = max(chosen, key=lambda i: (len(targets & set(i.pids)), not i.orphaned, len(i.pids)))
    return Scene(snapshot=snapshot, instance=instance, others=tuple(i for i in instances if i is not instance))

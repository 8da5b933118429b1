"""Which nodes make one job, and which of them have to be judged together."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllmdiag.diagnosis.scene import Scene, scene_of
from vllmdiag.model.fleet import NodeReport
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.serve_options import ServeOptions, job_of

_NO_HOST = {"", "*", "0.0.0.0", "::"}  # noqa: S104  addresses that are read, not bound
End = tuple[str, str]
"""Local and remote address of an established TCP connection."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one node has of a job."""

    node: str
    scene: Scene
    skew_s: float | None = None

    @property
    def snapshot(self) -> Snapshot:
        """What was seen there."""
        return self.scene.snapshot

    @property
    def options(self) -> ServeOptions | None:
        """Of the `vllm serve` of this node."""
        return self.scene.options

    @property
    def node_rank(self) -> int:
        """By its arguments."""
        return self.options.node_rank if self.options is not None else 0

    @cached_property
    def ends(self) -> frozenset[End]:
        """TCP connections of its members that may lead to another node."""
        mine = set(self.scene.instance.pids)
        return frozenset(
            (s.local, s.remote)
            for s in self.snapshot.sockets
            if s.family != "unix" and s.state == "ESTAB" and mine & set(s.pids) and not is_loopback(s.local)
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """Names and addresses under which other nodes may know it."""
        hosts = {_host(s.local) for s in self.snapshot.sockets if s.family != "unix" and s.local}
        return frozenset({self.node, self.snapshot.node.hostname, *hosts} - _NO_HOST)

    @property
    def age_s(self) -> float | None:
        """Of the process that the node's part of the job was started with."""
        process = self.scene.processes.get(self.scene.instance.roots[0])
        return process.age_s if process is not None else None

    def touches(self, other: Part) -> bool:
        """A TCP connection between members of the two stands, seen from both ends."""
        return any((remote, local) in other.ends for local, remote in self.ends)


@dataclass(frozen=True, eq=False)
class Job:
    """One server on its nodes, the head first."""

    parts: tuple[Part, ...]

    @property
    def head(self) -> Part:
        """The node with the API servers, or the first."""
        return self.parts[0]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys(part.node for part in self.parts))

    @property
    def expected(self) -> int:
        """Nodes that its arguments speak of; as many as were seen where they say nothing."""
        options = self.head.options
        spread = 1
        if options is not None and options.nnodes > 1:
            spread = options.nnodes
        elif options is not None and not options.several_servers and options.data_parallel_size_local:
            spread = -(-options.data_parallel_size // options.data_parallel_size_local)
        return max(len(self._ranks), spread)

    @property
    def absent(self) -> int:
        """Nodes that are expected and of which nothing was seen."""
        return self.expected - len(self._ranks)

    @cached_property
    def _ranks(self) -> frozenset[object]:
        """What was seen of it. Two nodes of a job may live on one host: then their numbers tell them apart."""
        options = self.head.options
        if options is None or options.nnodes <= 1:
            return frozenset(p.node for p in self.parts)
        roots = ((p, root) for p in self.parts for root in p.scene.instance.roots)
        return frozenset(rank if (rank := p.scene.node_rank(root)) is not None else p.node for p, root in roots)

    @cached_property
    def units(self) -> tuple[tuple[Part, ...], ...]:
        """Parts to be judged together: those that hold ranks of one engine."""
        options = self.head.options
        if options is not None and options.nnodes > 1:
            local = options.data_parallel_size_local or options.data_parallel_size
            size = max(1, options.nnodes * local // options.data_parallel_size)
            groups: dict[int, list[Part]] = defaultdict(list)
            for part in self.parts:
                groups[part.node_rank // size].append(part)
            return tuple(tuple(group) for group in groups.values())
        if len(self.parts) > 1 and any(_only_ranks(part) for part in self.parts):
            return (self.parts,)
        return tuple((part,) for part in self.parts)


def jobs_of(reports: Iterable[NodeReport]) -> tuple[Job, ...]:
    """Group what all nodes answered into jobs, in the order of the nodes."""
    parts = [
        Part(report.node, scene, report.skew_s)
        for report in reports
        for snapshot in report.snapshots
        if (scene := scene_of(snapshot)) is not None
    ]
    groups = _by_arguments(parts)
    groups = _by_address(groups)
    return tuple(Job(tuple(sorted(group, key=_order))) for group in _by_connections(groups))


def _order(part: Part) -> tuple[bool, bool, int, str]:
    return bool(part.scene.instance.orphaned), not part.scene.servers, part.node_rank, part.node


def _by_arguments(parts: Sequence[Part]) -> list[list[Part]]:
    groups: dict[object, list[Part]] = defaultdict(list)
    for i, part in enumerate(parts):
        shared = job_of(part.options)
        if shared is None:
            groups["alone", i].append(part)
        elif shared[1] is None or is_loopback(shared[1]):
            groups[(shared, part.node)].append(part)
        else:
            groups[shared].append(part)
    return list(groups.values())


def _by_address(groups: list[list[Part]]) -> list[list[Part]]:
    """Give the head that needs no address of itself to those that name it."""
    kept = []
    calls = {key: group for group in groups if (key := job_of(group[0].options)) and key[1] and not is_loopback(key[1])}
    for group in groups:
        own = job_of(group[0].options)
        if own is not None and (own[1] is None or is_loopback(own[1])) and len(group) == 1:
            called = [(own[0], name, own[2]) for name in group[0].names]
            theirs = next((calls[key] for key in called if key in calls), None)
            if theirs is not None:
                theirs.extend(group)
                continue
        kept.append(group)
    return kept


def _only_ranks(part: Part) -> bool:
    """Workers of an engine that is elsewhere and no arguments that say whose: actors of Ray."""
    scene = part.scene
    return bool(scene.workers) and not scene.engines and not scene.servers and scene.options is None


def _by_connections(groups: list[list[Part]]) -> list[list[Part]]:
    """Give ranks that do not say where they belong to the job that they are connected with."""
    lost = [group for group in groups if len(group) == 1 and _only_ranks(group[0])]
    if not lost:
        return groups
    found = [group for group in groups if group not in lost]
    owner = {end: group for group in found for part in group for end in part.ends}
    waiting = lost
    while waiting:
        left = []
        for group in waiting:
            home = next((owner[r, local] for local, r in group[0].ends if (r, local) in owner), None)
            if home is None:
                left.append(group)
                continue
            home.extend(group)
            owner.update(dict.fromkeys(group[0].ends, home))
        if len(left) == len(waiting):
            return [*found, *left]
        waiting = left
    return found


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """An address (with or without a port) that means this machine wherever it is read."""
    host = address if address.count(":") > 1 and not address.startswith("[") else address.partition(":")[0]
    if address.startswith("["):
        host = _host(address)
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback

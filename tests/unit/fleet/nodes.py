"""Fleets made of recordings: each node a copy of a real one under a name, a boot and addresses of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import msgspec

from vllmdiag.fleet.judge import judge
from vllmdiag.model.base import Missing
from vllmdiag.model.fleet import FleetDiagnosis, NodeReport
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket

from .record import recorded

TOOL = "0.1.0"
_PORT = "29501"
"""Each recording had a free one as its master port; all jobs of one command line have the same."""


@cache
def state(name: str, shape: str = "tp8") -> Snapshot:
    """A recording, read once."""
    return recorded(name, shape)


def placed(snapshot: Snapshot, node: str) -> Snapshot:
    """The same on another node: pids and paths stay, as they would on machines of one image."""
    here = msgspec.structs.replace(snapshot.node, hostname=node, boot_id=f"boot of {node}")
    return msgspec.structs.replace(snapshot, node=here, tool=TOOL)


def report(node: str, *snapshots: Snapshot, **more: object) -> NodeReport:
    """A node that answered."""
    made = NodeReport(node=node, outcome="answered", snapshots=tuple(placed(s, node) for s in snapshots), tool=TOOL)
    return msgspec.structs.replace(made, **more)


def names(n: int) -> list[str]:
    """``node001`` ..."""
    return [f"node{k:03}" for k in range(1, n + 1)]


def replicas(n: int, faulty: str, fault: str, healthy: str = "serving") -> list[NodeReport]:
    """Independent servers of eight ranks, one a node, one of them with a fault."""
    return [report(node, state(fault if node == faulty else healthy)) for node in names(n)]


def halves(name: str, addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2")) -> list[Snapshot]:
    """The two nodes of a recorded job of two nodes, which shared a host, each with what is its own."""
    whole = state(name, "2nodes")
    head, follower = (_below(whole.processes, root) for root in _roots(whole))
    return [_part(whole, pids, addresses) for pids in (head, follower)]


def _roots(whole: Snapshot) -> list[int]:
    """The commands of the two nodes, the head first."""
    mine = [p for p in whole.processes if p.pid in whole.target_pids]
    pids = {p.pid for p in mine}
    tops = [p for p in mine if p.ppid not in pids]
    return [p.pid for p in sorted(tops, key=lambda p: "--headless" in p.title)]


def _below(processes: Iterable[Process], root: int) -> set[int]:
    found = {root}
    while more := {p.pid for p in processes if p.ppid in found} - found:
        found |= more
    return found


def _part(whole: Snapshot, pids: set[int], addresses: tuple[str, str]) -> Snapshot:
    """What belongs to `pids`. The miniature gave its nodes 127.0.0.1 and 127.0.0.2: they become real addresses."""
    text = msgspec.json.encode(
        msgspec.structs.replace(
            whole,
            target_pids=tuple(p for p in whole.target_pids if p in pids),
            processes=tuple(p for p in whole.processes if p.pid in pids),
            segments=tuple(
                msgspec.structs.replace(s, holders=tuple(h for h in s.holders if h.pid in pids))
                for s in whole.segments
                if any(h.pid in pids for h in s.holders)
            ),
            sockets=tuple(s for s in whole.sockets if set(s.pids) & pids),
            http=whole.http if _roots(whole)[0] in pids else (),
            metrics=whole.metrics if _roots(whole)[0] in pids else (),
        )
    )
    value = json.loads(text)

    def moved(address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{addresses[1] if host == '127.0.0.2' else addresses[0]}:{port}"

    for socket in value["sockets"]:
        if socket["family"] != "unix":
            socket["local"], socket["remote"] = moved(socket["local"]), moved(socket["remote"])
    for process in value["processes"]:
        if isinstance(words := process["cmdline"], list):
            words = [word.replace("127.0.0.1", addresses[0]) for word in words]
            process["cmdline"] = [_PORT if before == "--master-port" else w for before, w in pairwise(["", *words])]
    return msgspec.convert(value, Snapshot)


def aged(snapshot: Snapshot, age_s: float) -> Snapshot:
    """The same with processes of another age."""
    return msgspec.structs.replace(
        snapshot, processes=tuple(msgspec.structs.replace(p, age_s=age_s) for p in snapshot.processes)
    )


def cut_off(snapshot: Snapshot) -> Snapshot:
    """The same without a connection to another machine."""
    kept: list[Socket] = [s for s in snapshot.sockets if s.family == "unix" or s.state != "ESTAB"]
    return msgspec.structs.replace(snapshot, sockets=tuple(kept))


def blind(snapshot: Snapshot) -> Snapshot:
    """The same seen by somebody who may not read descriptors."""
    hole = Missing(what="descriptors", why="EACCES", next="run as root")
    processes = tuple(msgspec.structs.replace(p, socket_inodes=hole) for p in snapshot.processes)
    return msgspec.structs.replace(snapshot, processes=processes)


def fleet() -> FleetDiagnosis:
    """A fleet of every kind: a stopped rank on one node of two, servers that are well, nodes that are not."""
    head, follower = halves("worker-stopped")
    reports = [
        report("gpu01", head),
        report("gpu02", follower),
        *(report(f"gpu{k:02}", state("serving")) for k in range(3, 20)),
        report("gpu20", state("idle"), tool="0.0.9"),
        report("gpu21", state("idle"), skew_s=-42.0, skew_within_s=0.4),
        NodeReport(node="gpu22", outcome="silent", problem="no answer within 30 s"),
        NodeReport(node="gpu23", outcome="silent", problem="no answer within 30 s"),
        NodeReport(node="gpu24", outcome="refused", problem="exit code 255: Connection refused"),
        NodeReport(node="login", outcome="empty"),
    ]
    return judge(reports, "ssh", TOOL)

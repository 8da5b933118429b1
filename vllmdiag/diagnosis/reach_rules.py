"""What keeps newcomers out of a member: no descriptor or thread to spare, or an IO thread of ZMQ that does not run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from vllmdiag.model.base import Missing, known
from vllmdiag.model.diagnosis import Finding
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import ZmtpProbe
from vllmdiag.vllm.endpoints import FD_HEADROOM

from .case import Case

_NOT_ASKED = ("gated", "not-permitted")
_FEW_PIDS = 8
"""With fewer processes and threads to spare than this, and than a hundredth of the limit, the next pool will fail."""


def reach_findings(case: Case) -> Iterator[Finding]:
    """All of them, in that order."""
    yield from _without_descriptors(case)
    yield from _without_threads(case)
    yield from _silent(case)


def _without_descriptors(case: Case) -> Iterator[Finding]:
    # Requests that do not end keep their connections: then the stall is the root, and this one of its echoes.
    stalled = any(progress.frozen for progress in case.progress.values())
    for member in case.scene.instance.members:
        process = case.scene.processes[member.pid]
        limits = known(process.limits)
        limit = limits.nofile if limits is not None else None
        if process.n_fds is None or limit is None or process.n_fds + FD_HEADROOM <= limit:
            continue
        full = process.n_fds >= limit
        sockets = known(process.socket_inodes)
        waiting = [s for s in case.scene.listeners if member.pid in s.pids and s.recv_q]
        yield case.finding(
            "fd-exhausted",
            member.pid,
            f"{member.label} (pid {member.pid}) has {process.n_fds} of {limit} descriptors open"
            + (": it can accept nobody and open nothing" if full else ""),
            evidence=[
                f"{process.n_fds} descriptors in /proc/{member.pid}/fd, soft limit {limit}",
                *([f"{len(sockets)} of them are sockets"] if sockets else []),
                *(f"{s.recv_q} connections wait to be accepted on {s.local}" for s in waiting[:3]),
            ],
            chain=case.chain(member.pid),
            severity="critical" if full and not stalled else "warning",
        )


def _without_threads(case: Case) -> Iterator[Finding]:
    """The control group with the least room, told of the first member in it: engines before servers before others."""
    scene = case.scene
    order = [*scene.engines, *scene.servers, *scene.instance.members]
    groups = [(m, g) for m in order if (g := known(scene.processes[m.pid].cgroup)) is not None]
    rooms = [
        (g.pids_max - g.pids_current, g.pids_max, m)
        for m, g in groups
        if g.pids_max is not None and g.pids_current is not None
    ]
    if not rooms:
        return
    left, limit, member = min(rooms, key=lambda room: room[0])
    if left >= max(_FEW_PIDS, limit / 100):
        return
    full = left <= 0
    yield case.finding(
        "pids-limit",
        member.pid,
        f"the control group of {member.label} (pid {member.pid}) has {limit - left} of {limit} processes and threads"
        + (": no new one can be made" if full else ""),
        evidence=[
            f"pids.current {limit - left}, pids.max {limit}",
            f"{sum(len(p.threads) for p in scene.processes.values())} threads are of this instance",
        ],
        chain=case.chain(member.pid),
        severity="critical" if full else "warning",
    )


def _silent(case: Case) -> Iterator[Finding]:
    by_owner: dict[int, list[ZmtpProbe]] = defaultdict(list)
    for probe in case.scene.snapshot.zmtp:
        if probe.owner in case.scene.members:
            by_owner[probe.owner].append(probe)
    for pid, probes in by_owner.items():
        silent = [p for p in probes if p.outcome == "silent"]
        if not silent or case.halted(pid):
            continue
        asked = [p for p in probes if p.outcome not in _NOT_ASKED]
        yield case.finding(
            "zmq-io-silent",
            pid,
            f"{case.label(pid)} (pid {pid}) accepts on {len(silent)} of its {len(asked)} ZMQ endpoints that were probed"
            " and says nothing: an IO thread of it does not run",
            evidence=[f"{p.endpoint}: {p.reason}" for p in silent[:3]],
            chain=case.chain(pid),
            confidence="medium",
        )


def probed_words(snapshot: Snapshot) -> str:
    """``, 9 of 10 probed answer``; empty where nothing was probed."""
    asked = [p for p in snapshot.zmtp if p.outcome not in _NOT_ASKED]
    ready = sum(p.outcome == "ready" for p in asked)
    return f", {ready} of {len(asked)} probed answer" if asked else ""


def not_probed(snapshot: Snapshot) -> tuple[Missing, ...]:
    """What a probe was asked for and not made, equal reasons together."""
    groups: dict[tuple[str, str], list[ZmtpProbe]] = defaultdict(list)
    for probe in snapshot.zmtp:
        if probe.outcome in _NOT_ASKED:
            groups[probe.reason, probe.next].append(probe)
    return tuple(
        Missing(what=group[0].endpoint if len(group) == 1 else f"{len(group)} ZMQ endpoints", why=why, next=step)
        for (why, step), group in groups.items()
    )

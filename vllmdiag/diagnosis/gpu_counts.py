"""Ranks that are not at the same collective by NCCL's own counts, or by the dumps of the flight recorder."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.diagnosis import Finding, Subject
from vllmdiag.model.gpu import RasCommunicator, RasRank
from vllmdiag.model.process import Process

from .collectives import Absent, Lag, absent, lagging
from .flight import Disagreement, disagreements, say
from .gpu_group import Group, Rank
from .gpu_view import is_process, lag_in_words

_GONE = frozenset(["dead", "unresponsive", "missing"])


def counts_apart(group: Group) -> Finding | None:
    """A rank that has launched another number of collectives than the others, and does not move on."""
    snapshot = group.case.scene.snapshot
    for lag in lagging(snapshot):
        if _concerns(group, lag.communicator):
            return _lag(group, lag)
    for lost in absent(snapshot):
        if lost.reason in _GONE and _concerns(group, lost.communicator) and _local(group, lost.rank) is None:
            return _gone(group, lost)
    return None


def _concerns(group: Group, communicator: RasCommunicator) -> bool:
    """Ranks of the group are in it; a text report names few, so one that names none of ours may be ours."""
    told = (*communicator.ranks, *communicator.missing)
    return not told or any(_local(group, rank) is not None for rank in told) or bool(communicator.tallies)


def _local(group: Group, rank: RasRank) -> Rank | None:
    processes = group.case.scene.processes
    mine = [r for r in group.ranks if _same(rank, processes[r.pid])]
    return mine[0] if len(mine) == 1 else None


def _same(rank: RasRank, process: Process) -> bool:
    # Where several hosts are judged together, two of them may use the same pid.
    return is_process(rank, process) and not (process.node and rank.host and process.node != rank.host)


def _name(group: Group, rank: RasRank) -> str:
    mine = _local(group, rank)
    if mine is not None:
        return mine.label
    return f"rank {rank.rank}" + (f" (pid {rank.pid} on {rank.host})" if rank.host else "")


def _lag(group: Group, lag: Lag) -> Finding | None:
    words = lag_in_words(lag, lambda rank: _name(group, rank))
    agreed = _confirmed(group, lag)
    evidence = [f"NCCL: {words}", *agreed]
    if not lag.ranks:
        root = group.ranks[0]
        return group.say("collective-divergence", root, f"ranks are not at the same collective: {words}", evidence)
    local = next((r for r in (_local(group, rank) for rank in lag.ranks) if r is not None), None)
    if local is None:
        first = lag.ranks[0]
        summary = f"{_name(group, first)} is not at the collective of the others: {words}"
        return group.say("remote-rank-stalled", _remote(first), summary, evidence, confidence=group.sure())
    if lag.relation != "ahead" and local.own_business and local.act.seen and local.act.state:
        return _busy(group, local, evidence)  # it is late because it does something else
    summary = f"{words}; {local.member.label} is {_at(local)}"
    confident = lag.moving is False or bool(agreed)
    return group.say(
        "collective-divergence",
        local,
        summary,
        evidence,
        confidence="high" if (confident and lag.relation != "split") or agreed else "medium",
    )


def _busy(group: Group, rank: Rank, evidence: Sequence[str]) -> Finding | None:
    """Named for what it does; with an engine in sight the rules of the queue do that."""
    if group.engine is not None:
        return None
    summary = f"{rank.label} is {_at(rank)}, and by NCCL's counts the others wait for it"
    return group.say("worker-busy", rank, summary, evidence, confidence="medium", severity="warning")


def _at(rank: Rank) -> str:
    return f"at {rank.at}" if rank.act.seen else "not visible"


def _confirmed(group: Group, lag: Lag) -> list[str]:
    """Dumps of the flight recorder that suspect the same rank."""
    late = {rank.rank for rank in lag.ranks}
    return [
        f"flight recorder, group {one.group}, collective {one.seq}: {say(one)}"
        for one in disagreements(group.case.scene.snapshot.flight_records)
        if late & set(one.suspects)
    ]


def _remote(rank: RasRank) -> Subject:
    host = f" on {rank.host}" if rank.host else ""
    return Subject(role="Worker", rank={"rank": rank.rank}, node=rank.host or None, label=f"rank {rank.rank}{host}")


def _gone(group: Group, lost: Absent) -> Finding | None:
    rank = lost.rank
    if not rank.host:
        return None
    summary = (
        f"NCCL misses rank {rank.rank} (pid {rank.pid} on {rank.host}): {lost.reason}; the ranks of this node wait"
    )
    return group.say("remote-rank-stalled", _remote(rank), summary, confidence="medium")


def records_apart(group: Group) -> Finding | None:
    """Dumps of the flight recorder in which a rank has not entered what the others wait in, or entered another one."""
    ages = [r.age_s for r in group.case.scene.snapshot.flight_records if r.age_s is not None]
    lived = [p.age_s for r in group.ranks if (p := group.case.scene.processes[r.pid]).age_s is not None]
    if ages and lived and max(ages) > max(lived):
        return None  # left by an earlier run
    for one in disagreements(group.case.scene.snapshot.flight_records):
        root = _suspect(group, one)
        if one.waiting and one.suspects and not (root is not None and root.own_business and root.act.state):
            summary = f"flight recorder, group {one.group}, collective {one.seq}: {say(one)}"
            subject = root if root is not None else group.ranks[0]
            confident = root is not None and not one.undecided and not one.no_dump
            return group.say("collective-divergence", subject, summary, confidence="high" if confident else "medium")
    return None


def _suspect(group: Group, one: Disagreement) -> Rank | None:
    """The suspect among the ranks: the recorder counts over the whole world, of which one node holds the first part."""
    return _at_index(group.ranks, one.suspects[0]) if one.suspects and not group.remote else None


def _at_index(ranks: Sequence[Rank], index: int) -> Rank | None:
    return ranks[index] if 0 <= index < len(ranks) else None

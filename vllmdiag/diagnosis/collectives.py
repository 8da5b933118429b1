"""NCCL's counts, compared between ranks: who is behind, ahead or missing.

NCCL counts launches. Two looks are compared: a rank that is behind and moves is merely slower at this moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllmdiag.model.gpu import RasCommunicator, RasRank, RasReport
from vllmdiag.model.snapshot import Snapshot


@dataclass(frozen=True)
class Pair:
    """One communicator as the last report shows it, and as the first one did."""

    report: RasReport
    last: RasCommunicator
    first: RasCommunicator | None = None
    """None where it was seen once."""


@dataclass(frozen=True)
class Lag:
    """Ranks of one communicator that do not stand at the same count of one kind of collective."""

    communicator: RasCommunicator
    collective: str
    ranks: tuple[RasRank, ...]
    """Those that stand apart; empty where the halves are of equal size and no rank is named."""
    relation: str
    """``behind``: they have not launched what the others have. ``ahead``: they launched what no other did. ``split``:
    as many here as there."""
    low: int
    high: int
    moving: bool | None
    """The ranks that stand apart advanced within the window; None where they were seen once."""


@dataclass(frozen=True)
class Absent:
    """A rank that its communicator misses, or that is in error."""

    communicator: RasCommunicator
    rank: RasRank
    reason: str
    """``dead``, ``unresponsive``, ``left``, ``missing``, ``abort``, ``init``, or the error in words."""


def pairs(snapshot: Snapshot) -> Iterator[Pair]:
    """Each communicator once, in the order of the reports. In text, only named ones can be paired."""
    seen: dict[object, Pair] = {}
    for report in snapshot.ras:
        unnamed = 0
        for communicator in report.communicators:
            # A hash is unique within a job; two jobs may hold the same, but not the same processes.
            key: object = (communicator.hash, report.processes, _processes(communicator))
            if not communicator.hash:
                unnamed += 1
                key = ("", report.processes, communicator.size, unnamed)
            known = seen.get(key)
            earlier = None if known is None else known.first or known.last
            seen[key] = Pair(report, communicator, earlier)
    yield from seen.values()


def _processes(communicator: RasCommunicator) -> tuple[tuple[str, int | None], ...]:
    """What tells two jobs with the same hash apart; a text report does not name everybody, so it is not asked."""
    return (
        ()
        if communicator.tallies or communicator.status
        else tuple(sorted({(r.host, r.pid or 0) for r in (*communicator.ranks, *communicator.missing)}))
    )


def spreads(snapshot: Snapshot) -> tuple[Lag, ...]:
    """Communicators whose ranks stand at different counts, moving or not."""
    return tuple(lag for pair in pairs(snapshot) for lag in _lags(pair))


def lagging(snapshot: Snapshot) -> tuple[Lag, ...]:
    """Those whose ranks apart were not seen to move; where one rank is named before where none is.

    It is a fault only while work is outstanding: an idle server may rest in such a state.
    """
    still = [lag for lag in spreads(snapshot) if not lag.moving]
    return tuple(sorted(still, key=lambda lag: lag.relation == "split"))


def absent(snapshot: Snapshot) -> tuple[Absent, ...]:
    """Ranks that are missing from their communicator, have left it, or report an error."""
    found: list[Absent] = []
    for pair in pairs(snapshot):
        found += [Absent(pair.last, rank, rank.status) for rank in pair.last.missing]
        ill = [rank for rank in pair.last.ranks if rank.error or rank.status in {"abort", "init"}]
        found += [Absent(pair.last, rank, rank.error or rank.status) for rank in ill]
    return tuple(found)


def moved(pair: Pair) -> bool | None:
    """Any count changed between the looks; None where that cannot be told."""
    if pair.first is None or not (pair.last.ranks and pair.first.ranks):
        return None
    return any(_counts(pair.first, kind) != _counts(pair.last, kind) for kind in _kinds(pair.last))


def agreed(communicator: RasCommunicator) -> dict[str, int]:
    """Counts on which all ranks agree, by kind, those of zero left out."""
    found = {}
    for kind in _kinds(communicator):
        counts = set(_counts(communicator, kind).values())
        if len(counts) == 1 and counts != {0} and not communicator.tallies:
            found[kind] = counts.pop()
    return found


def _kinds(communicator: RasCommunicator) -> list[str]:
    told = [kind for rank in communicator.ranks for kind in rank.counts or ()]
    return list(dict.fromkeys([*told, *(tally.collective for tally in communicator.tallies if tally.collective)]))


def _counts(communicator: RasCommunicator, kind: str) -> dict[int, int]:
    return {r.rank: r.counts[kind] for r in communicator.ranks if r.counts is not None and kind in r.counts}


def _lags(pair: Pair) -> Iterator[Lag]:
    for kind in _kinds(pair.last):
        counts = _counts(pair.last, kind)
        totals = Counter(counts.values())
        for tally in pair.last.tallies:
            if tally.collective == kind:
                totals[tally.count] += tally.ranks
        if len(totals) < 2:
            continue
        low, high = min(totals), max(totals)
        behind, ahead = sum(totals.values()) - totals[high], totals[high]
        if behind == ahead == 1:  # of two, the lower one has not come to what the other waits in
            relation, apart = "behind", {rank for rank, n in counts.items() if n == low}
        elif behind == ahead:
            relation, apart = "split", {rank for rank, n in counts.items() if n < high}
        elif ahead < behind and len(totals) == 2:
            relation, apart = "ahead", {rank for rank, n in counts.items() if n == high}
        else:
            relation, apart = "behind", {rank for rank, n in counts.items() if n == low}
        yield Lag(
            communicator=pair.last,
            collective=kind,
            ranks=tuple(r for r in pair.last.ranks if r.rank in apart),
            relation=relation,
            low=low,
            high=high,
            moving=_moving(pair, kind, apart),
        )


def _moving(pair: Pair, kind: str, apart: set[int]) -> bool | None:
    if pair.first is None:
        return None
    first, last = _counts(pair.first, kind), _counts(pair.last, kind)
    if not apart:
        before = {t for t in pair.first.tallies if t.collective == kind}
        return before != {t for t in pair.last.tallies if t.collective == kind} if before else None
    known = [rank for rank in apart if rank in first]
    if not known:  # a text report names those that stood apart: then these did not, so something moved
        return True if pair.last.tallies else None
    return any(first[rank] != last[rank] for rank in known)

"""The GPU layer by rank: one row each, and in what a rank differs from those that agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from vllmdiag.model.gpu import (
    Accelerator,
    CommunicatorView,
    FlightView,
    RankView,
    RasCommunicator,
    RasRank,
    Reading,
)
from vllmdiag.model.process import Process
from vllmdiag.model.ranks import fold
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import GpuView
from vllmdiag.vllm.gpu import gpu

from .case import Case
from .collectives import Absent, Lag, Pair, absent, agreed, lagging, moved, pairs, spreads
from .devices import device_of, spinning, troubles
from .flight import disagreements, say

K = TypeVar("K")

_FULL_PCT, _IDLE_PCT = 95, 5
_MEMORY_SHARE = 0.2
"""Ranks hold about the same: a difference of this share of the device is one of kind."""
_SLOW_CLOCK = 0.6

_REASONS = {
    "dead": "is dead to NCCL: it was unreachable for a minute, and stays so even if it comes back",
    "unresponsive": "does not answer the others",
    "left": "has left the communicator, or never joined it",
    "missing": "is missing",
    "abort": "has aborted the communicator",
    "init": "is still initialising",
}


def gpu_views(case: Case) -> tuple[GpuView, ...]:
    """The GPU layer; nothing where the snapshot holds nothing of it and no rank exists."""
    snapshot = case.scene.snapshot
    one = GpuView(
        drivers=snapshot.drivers,
        ranks=rank_views(case),
        communicators=communicator_views(case),
        limits=gpu().ras.limits if snapshot.ras else (),
        dumps=dumps_in_words(snapshot),
        flights=flight_views(snapshot),
    )
    return (one,) if one != GpuView() else ()


def rank_views(case: Case) -> tuple[RankView, ...]:
    """One row for each process that may use a device, then one for each device in trouble that is nobody's."""
    scene = case.scene
    members = scene.workers or scene.engines
    found = [device_of(scene, scene.processes[m.pid]) for m in members]
    rows = [_row(case, m.pid, device, how) for m, (device, how) in zip(members, found, strict=True)]
    taken = [device for device, _ in found]
    rows = [
        msgspec.structs.replace(row, differs=(*words, *_apart(scene.snapshot, scene.processes[m.pid])))
        for row, words, m in zip(rows, outliers(rows), members, strict=True)
    ]
    for device in scene.snapshot.accelerators:
        ill = troubles(scene.snapshot, device)
        if device not in taken and ill:
            rows.append(_with_device(RankView(label=f"GPU {device.index}"), scene.snapshot, device, "no rank known"))
    return tuple(rows)


def _row(case: Case, pid: int, device: Accelerator | None, how: str) -> RankView:
    act = case.acts[pid]
    counts, still_moving = _launched(case.scene.snapshot, case.scene.processes[pid])
    row = RankView(
        label=case.label(pid),
        pid=pid,
        doing=act.doing,
        signature=act.signature,
        collectives=counts,
        collectives_moved=still_moving,
    )
    return row if device is None else _with_device(row, case.scene.snapshot, device, how)


def _with_device(row: RankView, snapshot: Snapshot, device: Accelerator, how: str) -> RankView:
    last = device.readings[-1] if device.readings else Reading(t=0.0)
    return msgspec.structs.replace(
        row,
        device=device.index,
        device_name=device.name,
        device_known_by=how,
        busy_pct=last.busy_pct,
        memory_busy_pct=last.memory_busy_pct,
        memory_used=last.memory_used,
        memory_total=last.memory_total,
        power_w=last.power_w,
        power_limit_w=last.power_limit_w,
        temperature_c=last.temperature_c,
        clock_mhz=last.clock_mhz,
        clock_max_mhz=last.clock_max_mhz,
        throttle=last.throttle,
        pcie=_pcie(last),
        links_up=sum(link.up for link in last.links) if last.links else None,
        links=len(last.links) or None,
        fabric=device.fabric,
        ecc_uncorrected=device.ecc_uncorrected,
        rows_remapped=device.rows_remapped,
        spinning=spinning(device),
        troubles=troubles(snapshot, device),
    )


def _pcie(reading: Reading) -> str:
    if reading.pcie_width is None:
        return ""
    generation = f"gen{reading.pcie_generation} " if reading.pcie_generation is not None else ""
    most = f" of {reading.pcie_width_max}" if reading.pcie_width_max not in {None, reading.pcie_width} else ""
    return f"{generation}x{reading.pcie_width}{most}"


# -- who differs ------------------------------------------------------------------------------------------------------


def outliers(rows: Sequence[RankView]) -> list[tuple[str, ...]]:
    """For each row in what it differs from most of the others, in words; nothing where there is no majority."""
    words: list[list[str]] = [[] for _ in rows]

    def compare(value: Callable[[RankView], K | None], text: Callable[[RankView, RankView], str]) -> None:
        for i, usual in _odd_ones([value(row) for row in rows]):
            words[i].append(text(rows[i], rows[usual]))

    compare(
        lambda row: row.signature or row.doing or None,
        lambda row, usual: f"{row.doing or 'does something else'}, the others: {usual.doing}",
    )
    compare(_load, lambda row, usual: f"{row.busy_pct} % busy, the others {usual.busy_pct} %")
    compare(
        lambda row: row.spinning if _load(row) == "full" else None,
        lambda row, _: "its kernel waits" if row.spinning else "its kernel does not wait",
    )
    compare(_memory, lambda row, usual: f"holds {_gib(row)}, the others {_gib(usual)}")
    compare(lambda row: row.links_up, lambda row, usual: f"{row.links_up} links up, the others {usual.links_up}")
    compare(lambda row: row.fabric or None, lambda row, usual: f"fabric {row.fabric}, the others {usual.fabric}")
    compare(
        lambda row: row.pcie.partition("x")[2] or None, lambda row, usual: f"PCIe {row.pcie}, the others {usual.pcie}"
    )
    compare(
        lambda row: row.device_name or None, lambda row, usual: f"{row.device_name}, the others {usual.device_name}"
    )
    compare(_slow, lambda row, _: f"clock {row.clock_mhz} of {row.clock_max_mhz} MHz")
    return [tuple(w) for w in words]


def _odd_ones(values: Sequence[K | None]) -> Iterator[tuple[int, int]]:
    """Index of each value that is not the one most have, with the index of one that is. Unknown is not different."""
    known = [value for value in values if value is not None]
    if not known:
        return
    usual, times = Counter(known).most_common(1)[0]
    if times * 2 <= len(known):
        return
    example = values.index(usual)
    yield from ((i, example) for i, value in enumerate(values) if value is not None and value != usual)


def _load(row: RankView) -> str | None:
    """Full or idle; what lies between says nothing of a difference."""
    if row.busy_pct is None:
        return None
    return "full" if row.busy_pct >= _FULL_PCT else "idle" if row.busy_pct <= _IDLE_PCT else None


def _memory(row: RankView) -> int | None:
    if row.memory_used is None or not row.memory_total:
        return None
    return round(row.memory_used / row.memory_total / _MEMORY_SHARE)


def _gib(row: RankView) -> str:
    return f"{(row.memory_used or 0) / 2**30:.0f} GiB"


def _slow(row: RankView) -> bool | None:
    if row.clock_mhz is None or not row.clock_max_mhz or _load(row) != "full":
        return None
    return row.clock_mhz < _SLOW_CLOCK * row.clock_max_mhz


# -- NCCL -------------------------------------------------------------------------------------------------------------


def is_process(rank: RasRank, process: Process) -> bool:
    """NCCL tells the pid that the rank has in its own namespace."""
    return rank.pid is not None and rank.pid in {process.pid, *process.nspids[-1:]}


def _launched(snapshot: Snapshot, process: Process) -> tuple[dict[str, int], bool | None]:
    """What a process has launched, by kind, over its communicators; and whether that grew within the window."""
    totals: Counter[str] = Counter()
    before: Counter[str] = Counter()
    twice = False
    for pair in pairs(snapshot):
        totals.update(_own_counts(pair.last, process))
        if pair.first is not None:
            twice = True
            before.update(_own_counts(pair.first, process))
    counts = {kind: n for kind, n in totals.items() if n}
    return counts, (totals != before if twice and totals else None)


def _apart(snapshot: Snapshot, process: Process) -> Iterator[str]:
    """Counts of the process that are not those of its communicator. Those of two communicators say nothing together."""
    for lag in lagging(snapshot):
        if lag.relation != "split" and any(is_process(rank, process) for rank in lag.ranks):
            own, other = (lag.low, lag.high) if lag.relation == "behind" else (lag.high, lag.low)
            yield f"launched {own} {lag.collective}, others {other}"


def _own_counts(communicator: RasCommunicator, process: Process) -> dict[str, int]:
    return next((dict(rank.counts or {}) for rank in communicator.ranks if is_process(rank, process)), {})


def communicator_views(case: Case) -> tuple[CommunicatorView, ...]:
    """Each NCCL communicator with what is wrong with its ranks."""
    snapshot = case.scene.snapshot
    lags, gone = spreads(snapshot), absent(snapshot)
    return tuple(_communicator(case, pair, lags, gone) for pair in pairs(snapshot))


def _communicator(case: Case, pair: Pair, lags: Sequence[Lag], gone: Sequence[Absent]) -> CommunicatorView:
    one = pair.last
    name = one.hash or f"{one.size} ranks" + (f", {one.copies} communicators" if one.copies > 1 else "")
    findings = [
        f"{_who(case, a.rank)} {_REASONS.get(a.reason) or f'reports: {a.reason}'}"
        for a in gone
        if a.communicator is one
    ]
    findings += [lag_in_words(lag, lambda rank: _who(case, rank)) for lag in lags if lag.communicator is one]
    if pair.report.timeouts:
        findings.append(f"the ranks timed out on each other {pair.report.timeouts} times while this was put together")
    return CommunicatorView(
        name=name,
        size=one.size,
        nccl_version=pair.report.nccl_version,
        members=tuple(_who(case, rank) for rank in sorted((*one.ranks, *one.missing), key=lambda r: r.rank)),
        counts=", ".join(f"{kind} {count}" for kind, count in agreed(one).items()),
        moved=moved(pair),
        findings=tuple(findings),
    )


def _who(case: Case, rank: RasRank) -> str:
    for process in case.scene.processes.values():
        if is_process(rank, process):
            return case.label(process.pid)
    where = f" on {rank.host}" if rank.host else ""
    return f"rank {rank.rank} (pid {rank.pid}{where})" if rank.pid is not None else f"rank {rank.rank}"


def lag_in_words(lag: Lag, name: Callable[[RasRank], str] = lambda rank: f"rank {rank.rank}") -> str:
    """A lag in one line."""
    names = ", ".join(name(rank) for rank in lag.ranks)
    what = lag.collective
    if lag.relation == "behind" and names:
        text = f"{names} launched {lag.low} {what}, others {lag.high}: has not come to the next one"
    elif lag.relation == "ahead" and names:
        text = f"{names} launched {lag.high} {what}, the others {lag.low}: one that nobody else launched"
    else:
        text = f"ranks stand at {lag.low} and at {lag.high} {what}, as many here as there"
    return text + {None: "", True: " (moving)", False: " (not moving)"}[lag.moving]


# -- flight recorder --------------------------------------------------------------------------------------------------


def flight_views(snapshot: Snapshot) -> tuple[FlightView, ...]:
    """Process groups in which the dumps do not agree."""
    ages = [record.age_s for record in snapshot.flight_records if record.age_s is not None]
    return tuple(
        FlightView(
            group=one.group,
            seq=one.seq,
            summary=say(one),
            suspects=one.suspects,
            ages_s=(max(ages), min(ages)) if ages else (),
        )
        for one in disagreements(snapshot.flight_records)
    )


def dumps_in_words(snapshot: Snapshot) -> str:
    """Which ranks left a dump; empty where none did."""
    ranks = fold(record.rank for record in snapshot.flight_records)
    return f"dumps of rank {ranks}" if ranks else ""

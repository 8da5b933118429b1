"""Compares two snapshots rank by rank. Pure. What the clock alone changes (ages, CPU seconds, load) is no difference.

Processes, rings and endpoints are matched by what people call them (role, rank, writer), so two looks at one server,
at a server before and after its restart, and at two servers that should be alike are compared in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.diagnosis.view import view
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.diff import Change, Changes, CounterChange, Diff, Fate, Side
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import EndpointView, InstanceView, MemberView, RingView

from .diff_facts import device_facts, instance_facts, process_facts, stack_change
from .redact_tokens import holds_token

_NOT_COMPARED = "they were redacted with different keys, or only one was: names of hosts, users and paths are left out"

Facts = Mapping[str, str]


class Look:
    """One side: the snapshot, its view and verdict, each made once."""

    def __init__(self, snapshot: Snapshot, source: str, key_id: str = "") -> None:
        self.snapshot, self.source, self.key_id = snapshot, source, key_id
        self.view: InstanceView = view(snapshot)
        self.diagnosis: Diagnosis = diagnose(snapshot)
        self.processes: dict[int, Process] = {p.pid: p for p in snapshot.processes}

    def side(self) -> Side:
        """What stands in the document."""
        verdict = self.diagnosis.verdict
        return Side(
            source=self.source,
            observed_at=self.snapshot.observed_at,
            window_s=self.snapshot.window_s,
            status=verdict.status,
            cause=verdict.cause,
            summary=verdict.summary,
            key_id=self.key_id,
        )


def compare(before: Look, after: Look) -> Diff:
    """The difference between two looks."""
    comparable = before.key_id == after.key_id
    apart = _apart(before.snapshot.observed_at, after.snapshot.observed_at)
    keep: Callable[[Change], bool] = (lambda _change: True) if comparable else _without_tokens
    processes = tuple(_processes(before, after, keep))
    restarted = any(p.fate != "same" for p in processes)
    changes = {
        "instance": tuple(filter(keep, _changed(instance_facts(before), instance_facts(after)))),
        "processes": processes,
        "rings": tuple(_things(_rings(before.view), _rings(after.view), keep)),
        "endpoints": tuple(_things(_endpoints(before.view), _endpoints(after.view), keep)),
        "counters": tuple(_counters(before.view, after.view, None if restarted else apart)),
        "devices": tuple(_things(device_facts(before.snapshot), device_facts(after.snapshot), keep)),
    }
    return Diff(
        before=before.side(),
        after=after.side(),
        apart_s=apart,
        differs=any(changes.values()),
        not_compared="" if comparable else _NOT_COMPARED,
        **changes,  # type: ignore[arg-type]
    )


def _processes(before: Look, after: Look, keep: Callable[[Change], bool]) -> Iterator[Changes]:
    old, new = ({m.label: m for m in look.view.members} for look in (before, after))
    for label in dict.fromkeys([*old, *new]):
        a, b = old.get(label), new.get(label)
        fate = _fate(before, a, after, b)
        changes = tuple(filter(keep, _process(before, a, after, b))) if a is not None and b is not None else ()
        if fate != "same" or changes:
            yield Changes(
                name=label,
                fate=fate,
                pid_before=a.pid if a is not None else None,
                pid_after=b.pid if b is not None else None,
                changes=changes,
            )


def _fate(before: Look, a: MemberView | None, after: Look, b: MemberView | None) -> Fate:
    if a is None or b is None:
        return "appeared" if a is None else "gone"
    old, new = _process_of(before, a), _process_of(after, b)
    if old is None or new is None:
        return "same" if a.pid == b.pid else "restarted"
    known = bool(old.starttime and new.starttime)
    return "same" if old.pid == new.pid and (not known or old.starttime == new.starttime) else "restarted"


def _process(before: Look, a: MemberView, after: Look, b: MemberView) -> Iterator[Change]:
    old, new = _process_of(before, a), _process_of(after, b)
    yield from _changed(_member(a), _member(b))
    if old is not None and new is not None:
        stack = stack_change(old, new)
        if stack is not None:
            yield stack
        yield from _changed(process_facts(old), process_facts(new))


def _process_of(look: Look, member: MemberView) -> Process | None:
    return look.processes.get(member.pid) if member.pid is not None else None


def _member(member: MemberView) -> Facts:
    return {"state": member.state or "gone", "doing": member.doing, "stage": member.stage, "note": member.note}


def _rings(seen: InstanceView) -> dict[str, Facts]:
    return _named((_ring_name(ring), _ring(ring)) for ring in seen.rings)


def _ring_name(ring: RingView) -> str:
    writer = ring.writer.label if ring.writer is not None else "?"
    readers = {reader.party.label for reader in ring.readers if reader.party is not None}
    only = f" to {next(iter(readers))}" if len(readers) == 1 else ""
    return f"{ring.queue} of {writer}{only}"


def _ring(ring: RingView) -> Facts:
    facts = {
        "segment": ring.segment,
        "shape": f"{ring.geometry.chunks} x {ring.geometry.chunk_bytes} B, {ring.geometry.n_readers} readers",
        "motion": ring.motion,
    }
    if ring.last is not None:
        facts["writer at slot"] = "" if ring.last.writer_index is None else str(ring.last.writer_index)
        facts["problems"] = "; ".join(ring.last.problems)
    for reader in ring.readers:
        name = reader.party.label if reader.party is not None else f"reader {reader.index}"
        facts[f"unread by {name}"] = str(reader.lag)
    return facts


def _endpoints(seen: InstanceView) -> dict[str, Facts]:
    return _named((_endpoint_name(endpoint), _endpoint(endpoint)) for endpoint in seen.endpoints)


def _endpoint_name(endpoint: EndpointView) -> str:
    return f"{endpoint.name} of {endpoint.binder.label if endpoint.binder is not None else '?'}"


def _endpoint(endpoint: EndpointView) -> Facts:
    stuck = sorted({c.peer.label for c in endpoint.connections if c.stuck})
    return {
        "address": endpoint.address,
        "socket file": "removed" if endpoint.path_exists is False else "",
        "wait to be accepted": str(endpoint.waiting or 0),
        "expected and absent": ", ".join(party.label for party in endpoint.expected),
        "bytes that do not move": ", ".join(stuck),
    }


def _named(pairs: Iterable[tuple[str, Facts]]) -> dict[str, Facts]:
    """By name; those that have the same are numbered in their order."""
    found: dict[str, Facts] = {}
    for name, facts in pairs:
        number = 1
        while (f"{name} #{number}" if number > 1 else name) in found:
            number += 1
        found[f"{name} #{number}" if number > 1 else name] = facts
    return found


def _things(old: Mapping[str, Facts], new: Mapping[str, Facts], keep: Callable[[Change], bool]) -> Iterator[Changes]:
    for name in dict.fromkeys([*old, *new]):
        if name not in old or name not in new:
            yield Changes(name=name, fate="appeared" if name not in old else "gone")
        elif changes := tuple(filter(keep, _changed(old[name], new[name]))):
            yield Changes(name=name, changes=changes)


def _changed(old: Facts, new: Facts) -> Iterator[Change]:
    for what in dict.fromkeys([*old, *new]):
        a, b = old.get(what) or None, new.get(what) or None
        if a != b:
            yield Change(what=what, before=a, after=b)


def _counters(old: InstanceView, new: InstanceView, apart: float | None) -> Iterator[CounterChange]:
    a, b = ({(c.name, c.engine): c for client in seen.clients for c in client.counters} for seen in (old, new))
    for name, engine in dict.fromkeys([*a, *b]):
        before, after = a.get((name, engine)), b.get((name, engine))
        first, last = (c.last if c is not None else None for c in (before, after))
        if first == last:
            continue
        gauge = any(c is not None and c.gauge for c in (before, after))
        grew = last - first if first is not None and last is not None and not gauge else 0.0
        rate = round(grew / apart, 3) if grew > 0 and apart is not None and apart > 0 else None
        yield CounterChange(name=name, engine=engine, before=first, after=last, per_s=rate)


def _apart(before: str, after: str) -> float | None:
    try:
        a, b = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (before, after))
        return round((b - a).total_seconds(), 3)
    except (ValueError, TypeError):
        return None


def _without_tokens(change: Change) -> bool:
    """Neither side has something in it that only its own key explains."""
    return not any(holds_token(text) for text in (change.before, change.after) if text)

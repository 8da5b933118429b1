"""Reports to draw, each judged from a snapshot as a live one would be: the pictures an engineer may meet.

Among them one of 384 ranks, and one in which every text is an attack.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.unit.diagnosis import test_causes as causes
from tests.unit.diagnosis.scenario import (
    API,
    ENGINE,
    ENGINE_WAITS,
    WORKER0,
    WORKER_ALL_REDUCE,
    WORKER_IDLE,
    Server,
)
from vllmdiag.diagnosis.report import recorded_traces, report_of
from vllmdiag.model.base import Missing
from vllmdiag.model.recording import Begin, RecordedGeneration, RecordedRing, Recording, Track
from vllmdiag.model.report import Report
from vllmdiag.model.ring import Geometry, decode
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import MemberView, Party, ReaderView, RingView

MANY = 384
ATTACK = "</title><script>alert(1)</script><img src=x onerror=alert(2)>'\"&\x1b[31m\u202eabc"
GEOMETRY = Geometry(chunks=10, chunk_bytes=1 << 20, n_readers=2)


def snapshot_of(change: Callable[[Server], None] | None = None) -> Snapshot:
    """A server of two ranks after a change; idle without one."""
    server = Server()
    if change is not None:
        change(server)
    return server.snapshot()


def critical() -> Report:
    """One worker is stopped."""
    return report_of(snapshot_of(causes.worker_stopped))


def healthy() -> Report:
    """Nothing to do."""
    return report_of(snapshot_of())


def blind() -> Report:
    """Hardly anything could be seen."""
    server = Server(polled=False)
    hole = Missing(what="stacks", why="EACCES: another user", next="sudo vllmdiag diagnose 100")
    server.stacks = dict.fromkeys((API, ENGINE, *server.workers), hole)
    return report_of(msgspec.structs.replace(server.snapshot(), missing=(hole,)))


def many() -> Report:
    """384 ranks, one of them stopped in front of a collective; a broadcast ring that all of them read."""
    server = Server(tp=MANY)
    odd = WORKER0 + 217
    server.stacks = {ENGINE: ENGINE_WAITS, **dict.fromkeys(server.workers, WORKER_ALL_REDUCE), odd: WORKER_IDLE}
    server.states = {odd: "T"}
    server.cpu = {pid: 1.0 for pid in server.workers if pid != odd}
    server.metrics = ({"num_requests_running": 1.0},) * 2
    report = report_of(server.snapshot())
    assert report.view is not None
    readers = tuple(
        ReaderView(
            index=k,
            party=Party(label=f"Worker_TP{k}", pid=WORKER0 + k),
            lag=int(k == 217),
            unread_s=3.0 * (k == 217) or None,
        )
        for k in range(MANY)
    )
    flags = b"".join(bytes([1, *(0 if (slot, k) == (5, 217) else 1 for k in range(MANY))]) for slot in range(10))
    broadcast = RingView(
        segment="psm_broadcast",
        queue="broadcast ring",
        geometry=Geometry(chunks=10, chunk_bytes=1 << 24, n_readers=MANY),
        writer=Party(label="EngineCore", pid=ENGINE),
        readers=readers,
        last=decode(flags, MANY),
        motion="stuck",
        summary="1 of 10 slots unread by Worker_TP217 for at least 3.0 s",
        polls=100,
        polled_s=3.0,
    )
    return msgspec.structs.replace(
        report, view=msgspec.structs.replace(report.view, rings=(broadcast, *report.view.rings))
    )


def all_different() -> Report:
    """384 ranks of which every one does something else."""
    report = many()
    assert report.view is not None
    members = tuple(
        MemberView(pid=1000 + k, role="Worker", label=f"Worker_TP{k}", state="R", doing=f"in step_{k} (model.py:{k})")
        for k in range(MANY)
    )
    return msgspec.structs.replace(report, view=msgspec.structs.replace(report.view, members=members))


def hostile() -> Report:
    """Every text that the machine gave is an attack on the page, and on whoever reads it."""
    return msgspec.convert(_poisoned(msgspec.to_builtins(critical())), Report)


_WORDS = {
    *("schema", "status", "layer", "severity", "confidence", "motion", "state"),
    *("queue", "role", "cause", "folded_into", "thread", "observed_at"),
}
"""Fields that hold words of ours, not of the machine."""


def _poisoned(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: _poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_poisoned(item, key) for item in value]
    return value + ATTACK if isinstance(value, str) and key not in _WORDS else value


def recording() -> Recording:
    """A minute in which reader 1 stops reading after twenty seconds."""
    times, flags = [], []
    slots = [bytearray([1, 1, 1]) for _ in range(10)]
    for step in range(60):
        late = step > 20
        slots[step % 10] = bytearray([1, 1, 0 if late else 1])
        times.append(float(step))
        flags.append(b"".join(slots))
        if step > 29:
            break
    ring = RecordedRing(
        segment="psm_recorded",
        queue="broadcast ring",
        geometry=GEOMETRY,
        writer=Party(label="EngineCore", pid=200),
        readers=(Party(label="Worker_TP0", pid=300), Party(label="Worker_TP1", pid=301)),
    )
    begin = Begin(at="2026-01-01T00:00:00Z", pid=100, rings=(ring,))
    track = Track(ring=ring, times=tuple(times), flags=tuple(flags))
    return Recording(generations=(RecordedGeneration(begin=begin, tracks=(track,), end_s=60.0),))


def recorded() -> Report:
    """A recording alone."""
    return Report(traces=recorded_traces(recording(), "night.rec"))


PAGES: dict[str, Callable[[], Report]] = {
    "critical": critical,
    "healthy": healthy,
    "blind": blind,
    "many": many,
    "all-different": all_different,
    "hostile": hostile,
    "recorded": recorded,
}

"""A recording and pictures made by hand: a worker stops in mid-work, and a bundle is captured."""

from __future__ import annotations

from vllmdiag.model.diagnosis import Subject
from vllmdiag.model.recording import (
    Begin,
    EventLine,
    MemberLine,
    RecordedGeneration,
    RecordedMember,
    RecordedRing,
    Recording,
    Track,
)
from vllmdiag.model.ring import Geometry
from vllmdiag.model.view import Party
from vllmdiag.model.watch import Event, Frame
from vllmdiag.watch.frames import frame_at

AT = "2026-12-01T07:00:00.000Z"
API, CORE = Party(label="APIServer", pid=10), Party(label="EngineCore", pid=11)
TP0, TP1 = Party(label="Worker_TP0", pid=12), Party(label="Worker_TP1", pid=13)
_MIB = 1 << 20
BROADCAST = RecordedRing(
    segment="psm_1",
    queue="broadcast ring",
    geometry=Geometry(chunks=10, chunk_bytes=16 * _MIB, n_readers=2),
    writer=CORE,
    readers=(TP0, TP1),
)
RESPONSE = RecordedRing(
    segment="psm_2",
    queue="response ring",
    geometry=Geometry(chunks=10, chunk_bytes=24 * _MIB, n_readers=1),
    writer=TP1,
    readers=(CORE,),
)


def _flags(unread: dict[int, tuple[int, ...]]) -> bytes:
    rows = ([1, *(0 if k in unread.get(slot, ()) else 1 for k in range(2))] for slot in range(10))
    return bytes(flag for row in rows for flag in row)


def generation(number: int = 1) -> RecordedGeneration:
    """Ten messages in two seconds, then reader 1 takes nothing more."""
    times, flags = [0.0], [_flags({})]
    for i in range(10):
        times += [0.5 + i * 0.2, 0.6 + i * 0.2]
        flags += [_flags({i: (0, 1)}), _flags({})]
    times += [3.0, 3.1]
    flags += [_flags({0: (0, 1)}), _flags({0: (1,)})]
    stall = Event(
        at="2026-12-01T07:00:08.500Z",
        kind="stall",
        summary="Worker_TP1 (pid 13) is stopped (T)",
        generation=number,
        cause="process-stopped",
        layer=1,
        subject=Subject(role="Worker", pid=13, label="Worker_TP1"),
        confidence="high",
        since_s=5.4,
    )
    captured = Event(
        at="2026-12-01T07:00:08.900Z",
        kind="captured",
        summary="stall.tar.gz",
        generation=number,
        cause="process-stopped",
        bundle="stall.tar.gz",
    )
    return RecordedGeneration(
        begin=Begin(
            tool="0.1.0",
            at=AT,
            generation=number,
            hz=100.0,
            node="gpu-17",
            pid=10,
            port=8000,
            vllm_version="0.32.0",
            model="tiny",
            members=tuple(
                RecordedMember(pid=p.pid or 0, role=p.label.partition("_")[0], label=p.label, depth=depth)
                for p, depth in ((API, 0), (CORE, 1), (TP0, 2), (TP1, 2))
            ),
            rings=(BROADCAST, RESPONSE),
        ),
        tracks=(
            Track(ring=BROADCAST, times=tuple(times), flags=tuple(flags)),
            Track(ring=RESPONSE, times=(0.0,), flags=(bytes([1, 1] * 10),)),
        ),
        members=(
            MemberLine(t=0.0, pid=10, state="S", doing="idle"),
            MemberLine(t=0.0, pid=11, state="S", doing="waits for the reply of its workers"),
            MemberLine(t=0.0, pid=12, state="R", doing="in all_reduce"),
            MemberLine(t=0.0, pid=13, state="R", doing="in all_reduce"),
            MemberLine(t=3.0, pid=13, state="T", doing="stopped (T)"),
        ),
        events=(EventLine(t=8.5, event=stall), EventLine(t=8.9, event=captured)),
        start_s=0.0,
        end_s=20.0,
    )


def recording() -> Recording:
    """Two servers, the second of which was cut off."""
    return Recording(generations=(generation(1), generation(2)), cut=True)


def moving() -> Frame:
    """In mid-work."""
    return frame_at(generation(), 2.4)


def stalled() -> Frame:
    """After the capture."""
    return frame_at(generation(), 12.0)


def waiting() -> Frame:
    """No server is here."""
    return Frame(
        title="waiting for a vLLM server",
        at=AT,
        events=(Event(at=AT, kind="waiting", summary="no vLLM server is here; waiting for one"),),
    )

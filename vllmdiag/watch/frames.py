"""A recording as pictures: the server as it stood at any time of it."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from vllmdiag.diagnosis.rings import Ring
from vllmdiag.diagnosis.view import ring_view
from vllmdiag.model.recording import RecordedGeneration, RecordedRing, Track
from vllmdiag.model.shm import Segment
from vllmdiag.model.view import InstanceView, MemberView, RingView
from vllmdiag.model.watch import Frame
from vllmdiag.render.live import title

_WINDOW_S = 1.0
"""Motion in a picture is what moved within so long before it."""
_EVENTS = 6
_QUEUES = {"broadcast ring": "broadcast", "response ring": "response", "group ring": "group"}
_NOT_WELL = ("T", "t", "Z", "X", "")
_BEGIN_OF_TROUBLE = ("stall", "died")


def frame_at(recorded: RecordedGeneration, t: float) -> Frame:
    """The picture at `t` seconds of a recording."""
    begin = recorded.begin
    rings = tuple(_ring(track, recorded, t) for track in recorded.tracks)
    members = []
    for member in begin.members:
        then = recorded.member_at(member.pid, t)
        state, doing = (then.state, then.doing) if then is not None else ("", "")
        members.append(
            MemberView(
                pid=member.pid,
                role=member.role,
                label=member.label,
                depth=member.depth,
                state=state,
                doing=doing,
                abnormal=then is not None and state in _NOT_WELL,
            )
        )
    moved = [track.still_since(t) for track in recorded.tracks]
    last = max((at for at in moved if at is not None), default=recorded.start_s)
    events = tuple(line.event for line in recorded.events if line.t <= t)
    story = [e for e in events if e.kind in (*_BEGIN_OF_TROUBLE, "recovered")]
    trouble = story[-1] if story and story[-1].kind in _BEGIN_OF_TROUBLE else None
    shown = InstanceView(
        vllm_version=begin.vllm_version,
        model=begin.model,
        node=begin.node,
        port=begin.port,
        members=tuple(members),
        rings=rings,
    )
    return Frame(
        title=title(shown) + (f" · server {begin.generation}" if begin.generation > 1 else ""),
        at=_clock(begin.at, t),
        t=t,
        of_s=recorded.end_s,
        status=f"{trouble.cause}: {trouble.summary}" if trouble is not None else "",
        bad=trouble is not None,
        still_s=t - last if t - last >= _WINDOW_S else None,
        messages_per_s=sum(ring.rate or 0.0 for ring in rings),
        view=shown,
        events=events[-_EVENTS:],
    )


def _ring(track: Track, recorded: RecordedGeneration, t: float) -> RingView:
    start = max(recorded.start_s, t - _WINDOW_S)
    view = ring_view(_window(track, start, t, recorded.begin.hz), _names(track.ring).__getitem__)
    since = track.still_since(t)
    return standing(view, t - since) if since is not None else view


def standing(ring: RingView, still_s: float) -> RingView:
    """A ring that was seen for a second and is known to have stood longer: so have the messages that are unread."""
    return msgspec.structs.replace(
        ring,
        still_s=round(still_s, 3),
        readers=tuple(
            msgspec.structs.replace(r, unread_s=round(still_s, 3)) if r.unread_s is not None else r
            for r in ring.readers
        ),
    )


def _window(track: Track, start: float, end: float, hz: float) -> Ring:
    """The last second of a track as a ring that was watched for a second."""
    ring = track.ring
    history = tuple((t - start, state) for t, state in track.between(start, end))
    seen_s = max(end - start, 1e-3)
    polls = int(seen_s * hz) if history else 0
    return Ring(
        segment=Segment(path=ring.segment, dev=0, ino=0, size=ring.geometry.size, polls=polls, polled_s=seen_s),
        queue=_QUEUES.get(ring.queue, ""),
        geometry=ring.geometry,
        geometry_known_by="",
        writer=ring.writer.pid if ring.writer is not None else None,
        writer_confirmed=False,
        readers=tuple(reader.pid if reader is not None else None for reader in ring.readers),
        history=history,
    )


def _names(ring: RecordedRing) -> dict[int, str]:
    parties = (ring.writer, *ring.readers)
    return {p.pid: p.label for p in parties if p is not None and p.pid is not None}


def _clock(at: str, t: float) -> str:
    began = datetime.fromisoformat(at.replace("Z", "+00:00"))
    return (began + timedelta(seconds=t)).isoformat(timespec="milliseconds").replace("+00:00", "Z")

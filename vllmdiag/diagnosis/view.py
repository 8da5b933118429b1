"""The instance of a snapshot as people look at it: one struct per verb, everything by role and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vllmdiag.model.base import known
from vllmdiag.model.http import MetricsScrape
from vllmdiag.model.ring import SlotState
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import (
    ClientView,
    CounterView,
    HttpConnectionView,
    InstanceView,
    MemberView,
    Motion,
    MountView,
    Party,
    ReaderView,
    RingView,
    SegmentView,
    StackView,
)
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.layouts import classify_file
from vllmdiag.vllm.signatures import state_of

from .activity import DEAD, STOPPED, UNINTERRUPTIBLE, same_stack
from .case import Case
from .client_rules import stuck_connections
from .endpoints import endpoint_views
from .gpu_view import gpu_views
from .judge import missing_of
from .motion import is_counter
from .rings import Ring
from .scene import scene_of
from .startup import standing_of

QUEUE_WORDS = {"broadcast": "broadcast ring", "response": "response ring", "group": "group ring", "": "ring"}
"""What a ring is called."""


def view(snapshot: Snapshot) -> InstanceView:
    """Everything that a verb may show of the instance. A snapshot without vLLM gives only its segments."""
    scene = scene_of(snapshot)
    if scene is None:
        return InstanceView(
            observed_at=snapshot.observed_at,
            window_s=snapshot.window_s,
            node=snapshot.node.hostname,
            segments=tuple(_segment(snapshot, None, s) for s in snapshot.segments),
            mounts=tuple(
                MountView(path=m.path, size=m.size, free=m.free, seen_by=(Party(label="this shell"),))
                for m in snapshot.shm_mounts
            ),
            missing=missing_of(snapshot),
        )
    case = Case(scene)
    return msgspec.structs.replace(
        _moving(case),
        segments=tuple(_segment(snapshot, case, s) for s in snapshot.segments),
        mounts=tuple(_mounts(case)),
        endpoints=endpoint_views(case),
        stale_ipc_paths=case.scene.snapshot.ipc_paths_stale,
        clients=tuple(_clients(case)),
        stacks=tuple(_stacks(case)),
        gpu=gpu_views(case),
        missing=missing_of(snapshot),
    )


def party(case: Case, pid: int) -> Party:
    """A process by the name people give it."""
    return Party(label=case.label(pid), pid=pid)


def _member(case: Case, member: Member) -> MemberView:
    process = case.scene.processes[member.pid]
    act = case.acts[member.pid]
    memory = known(process.memory)
    limits = known(process.limits)
    place = standing_of(case, member.pid) if case.starting else None
    notes = []
    if process.tracer_pid:
        notes.append(f"traced by {process.tracer_pid}")
    if case.scene.instance.orphaned and member.depth == 0:
        notes.append("its parent is gone")
    if len(process.nspids) > 1:
        notes.append(f"container pid {process.nspids[-1]}")
    return MemberView(
        pid=member.pid,
        role=member.role,
        label=member.label,
        ranks=member.ranks,
        state=process.state,
        doing=act.doing if member.role not in ("Helper", "ResourceTracker") else "",
        stage=place.words if place is not None and place.stage is not None else "",
        abnormal=act.kind in (DEAD, STOPPED, UNINTERRUPTIBLE),
        known_by=member.known_by,
        ppid=process.ppid,
        depth=member.depth,
        cpu=round(process.cpu_s / case.window_s, 3) if len(process.samples) > 1 and case.window_s else None,
        threads=len(process.threads) or None,
        age_s=process.age_s,
        rss=process.samples[-1].rss if process.samples else None,
        pss=memory.pss if memory is not None else None,
        shmem=memory.pss_shmem if memory is not None else None,
        fds=process.n_fds,
        fds_max=limits.nofile if limits is not None else None,
        note=", ".join(notes),
    )


def live_view(snapshot: Snapshot) -> InstanceView:
    """Members and rings alone: what changes from second to second. Cheap."""
    scene = scene_of(snapshot)
    if scene is None:
        return InstanceView(observed_at=snapshot.observed_at, node=snapshot.node.hostname)
    return _moving(Case(scene))


def _ring(case: Case, ring: Ring) -> RingView:
    remote = 0
    options = case.scene.options
    if ring.queue == "broadcast" and options is not None and options.nnodes > 1 and ring.writer is not None:
        remote = max(0, options.world_size - ring.geometry.n_readers)
    return ring_view(ring, case.label, remote)


def ring_view(ring: Ring, name: Callable[[int], str], remote_readers: int = 0) -> RingView:
    """A ring as people look at it.

    Args:
        ring: over a window.
        name: label of a pid.
        remote_readers: readers on other machines, which have no flag.
    """
    segment = ring.segment
    polled = segment.polled_s
    heads = next((h for h in segment.heads if h.chunk_bytes == ring.geometry.chunk_bytes), None)
    return RingView(
        segment=segment.name + (" (deleted)" if segment.deleted else ""),
        queue=QUEUE_WORDS[ring.queue],
        geometry=ring.geometry,
        geometry_known_by=ring.geometry_known_by + (", writer confirmed by sockets" if ring.writer_confirmed else ""),
        writer=Party(label=name(ring.writer), pid=ring.writer) if ring.writer is not None else None,
        readers=tuple(
            ReaderView(
                index=k,
                party=Party(label=name(pid), pid=pid) if pid is not None else None,
                lag=ring.last.lag[k] if ring.last is not None else 0,
                unread_s=round(ring.still_s, 3) if k in ring.stuck and ring.still_s is not None else None,
                took=ring.taken[k],
            )
            for k, pid in enumerate(ring.readers)
        ),
        last=ring.last,
        motion=_motion(ring),
        summary=_ring_words(ring, name),
        moved=ring.moved,
        messages=ring.published,
        rate=round(ring.published / polled, 1) if polled > 0 and ring.sampled else None,
        still_s=round(ring.still_s, 3) if ring.still_s is not None else None,
        polls=segment.polls,
        polled_s=round(polled, 3),
        overflow_slots=tuple(i for i, head in enumerate(heads.heads) if head[:1] == b"\x01") if heads else (),
        peeked=segment.peeked,
        remote_readers=remote_readers,
        missing=segment.missing,
    )


def _motion(ring: Ring) -> Motion:
    if not ring.sampled or ring.last is None:
        return "unknown"
    if all(state.problems for _, state in ring.history):
        return "broken"
    if ring.moved:
        return "moving"
    if ring.full:
        return "full"
    return "stuck" if ring.stuck else "idle"


def _ring_words(ring: Ring, name: Callable[[int], str]) -> str:
    if ring.last is None or ring.last.problems:
        return ring.last.problems[0] if ring.last is not None else "flags not readable"
    if ring.moved:
        return f"{ring.published} messages seen"
    if not ring.stuck:
        return "nothing unread" if any(s.state is not SlotState.EMPTY for s in ring.last.slots) else "never used"
    words = []
    for reader, slots in ring.stuck.items():
        pid = ring.readers[reader] if reader < len(ring.readers) else None
        who = name(pid) if pid is not None else f"reader {reader}"
        words.append(f"{len(slots)} of {ring.geometry.chunks} slots unread by {who}")
    return "; ".join(words) + (f" for at least {ring.still_s:.1f} s" if ring.still_s else "")


def _segment(snapshot: Snapshot, case: Case | None, segment: Segment) -> SegmentView:
    mine = case.scene.processes if case is not None else {}
    ring = next((r for r in case.rings if r.segment is segment), None) if case is not None else None
    kind = classify_file(segment.name, segment.size)
    orphan = not segment.holders and segment.holders_complete and not segment.deleted
    if segment.holders:
        why = ""
    elif not segment.holders_complete:
        why = "not every process could be asked whether it holds this"
    else:
        why = "no descriptor and no map in any process"
    names = {p.pid: p.comm for p in snapshot.processes}
    return SegmentView(
        name=segment.name,
        kind=QUEUE_WORDS[ring.queue] if ring is not None else kind.what,
        size=segment.size,
        resident=segment.resident,
        deleted=segment.deleted,
        holders=tuple(party(case, h.pid) for h in segment.holders if case is not None and h.pid in mine),
        outsiders=tuple(
            Party(label=names.get(h.pid, "other process"), pid=h.pid) for h in segment.holders if h.pid not in mine
        ),
        age_s=segment.mtime_age_s,
        orphan=orphan,
        removable=orphan and kind.ours,
        why=why,
        path=segment.path,
        dev=segment.dev,
        ino=segment.ino,
    )


def _mounts(case: Case) -> Iterator[MountView]:
    needs = max((s.size for s in case.scene.segments), default=0)
    for mount in case.scene.snapshot.shm_mounts:
        note = ""
        if needs and mount.size < needs:
            note = f"smaller than the largest segment ({needs / 2**20:.0f} MiB)"
        yield MountView(
            path=mount.path,
            size=mount.size,
            free=mount.free,
            seen_by=tuple(party(case, pid) for pid in mount.pids if pid in case.scene.members),
            note=note,
        )


def _clients(case: Case) -> Iterator[ClientView]:
    snapshot = case.scene.snapshot
    stuck = set(stuck_connections(case))
    for port in case.scene.http_ports:
        listener = next((s for s in case.scene.listeners if s.family != "unix" and s.port == port), None)
        connections = [s for s in snapshot.sockets if s.family != "unix" and s.port == port and s.state != "LISTEN"]
        yield ClientView(
            port=port,
            servers=tuple(party(case, m.pid) for m in case.scene.servers),
            waiting=listener.recv_q if listener is not None else None,
            backlog=listener.send_q if listener is not None else None,
            connections=tuple(
                HttpConnectionView(
                    remote=s.remote,
                    server=party(case, s.pids[0]) if s.pids and s.pids[0] in case.scene.members else None,
                    state=s.state,
                    send_q=s.send_q,
                    recv_q=s.recv_q,
                    stuck=s in stuck,
                    note="" if s.pids or s.inode else "owned by no process",
                )
                for s in connections
            ),
            probes=tuple(p for p in snapshot.http if p.port == port),
            counters=tuple(_counters([m for m in snapshot.metrics if m.port == port])),
        )


def _counters(scrapes: list[MetricsScrape]) -> Iterator[CounterView]:
    if not scrapes:
        return
    for name in sorted({n for s in scrapes for n in s.values}):
        for engine in sorted({e for s in scrapes for e in s.values.get(name, {})}):
            yield CounterView(
                name=name,
                engine=engine,
                first=scrapes[0].values.get(name, {}).get(engine),
                last=scrapes[-1].values.get(name, {}).get(engine),
                gauge=not is_counter(name),
            )


def _stacks(case: Case) -> Iterator[StackView]:
    for member in case.scene.instance.members:
        act = case.acts[member.pid]
        for thread in act.threads:
            found = state_of(thread.frames, member.role)
            yield StackView(
                pid=member.pid,
                label=member.label,
                thread=thread.name,
                main=thread is act.main,
                dumps=thread.dumps,
                same=same_stack(thread.stacks),
                frames=thread.frames,
                meaning=found.signature.meaning if found is not None else "",
                signature=found.signature.id if found is not None else "",
                on_cpu=any(s.active for s in thread.stacks),
                owns_gil=any(s.owns_gil for s in thread.stacks),
                cpu=round(thread.cpu, 3) if thread.cpu is not None else None,
            )


def _moving(case: Case) -> InstanceView:
    """What both views begin with: the instance, its members and its rings."""
    scene, snapshot = case.scene, case.scene.snapshot
    return InstanceView(
        observed_at=snapshot.observed_at,
        window_s=snapshot.window_s,
        vllm_version=scene.version,
        model=scene.options.model if scene.options is not None else None,
        node=snapshot.node.hostname,
        port=next(iter(scene.http_ports), None),
        members=tuple(_member(case, m) for m in scene.instance.members),
        rings=tuple(_ring(case, r) for r in case.rings),
    )

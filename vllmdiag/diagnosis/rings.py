"""Which queue each ring is, who writes and who reads it, and what its flags did over the window.

Size alone is ambiguous (25165836 bytes is 6 x 4 MiB with one reader or 1 x 24 MiB with eleven), so the part a ring
plays comes from its holders first (EngineCore and all its workers: broadcast; EngineCore and one worker: response;
workers only: group), and the geometry is the one of the known layouts that fits both. The sockets confirm the writer:
it binds an ipc path whose set of connected processes equals the other holders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from vllmdiag.model.ring import Geometry, RingState, decode
from vllmdiag.model.shm import RingClaim, Segment
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.layouts import Layout, candidates

from .scene import Scene

BROADCAST, RESPONSE, GROUP = "broadcast", "response", "group"
_ENOUGH_POLLS = 5
"""Fewer looks than this at a ring say nothing about motion."""


@dataclass(frozen=True)
class Ring:
    """One ring of the instance over the window."""

    segment: Segment
    queue: str
    """broadcast, response, group, or "" where the holders do not tell."""
    geometry: Geometry
    geometry_known_by: str
    writer: int | None
    writer_confirmed: bool
    """The sockets say the same."""
    readers: tuple[int | None, ...]
    """Pid by flag index; None where it could not be joined (a dead rank, or not seen)."""
    history: tuple[tuple[float, RingState], ...] = field(repr=False)
    """(seconds after the start of the window, state from then on)."""

    @property
    def last(self) -> RingState | None:
        """State at the end of the window."""
        return self.history[-1][1] if self.history else None

    @property
    def sampled(self) -> bool:
        """It was looked at often enough to speak of motion, or written down by somebody before whom it stood still."""
        return self.segment.polls >= _ENOUGH_POLLS or self.segment.claim is not None

    @property
    def moved(self) -> int:
        """Changes of state seen."""
        return max(0, len(self.history) - 1) + self.segment.states_dropped

    @property
    def still_s(self) -> float | None:
        """Seconds from the last change to the end of the polling."""
        if not self.history:
            return None
        first, last = self.history[0][0], self.history[-1][0]
        return max(0.0, self.segment.polled_s - (last - first))

    @cached_property
    def stuck(self) -> dict[int, tuple[int, ...]]:
        """Reader index -> slots that it left unread in every state of the window; empty without enough looks."""
        if not self.sampled or not self.history:
            return {}
        result = {}
        for reader in range(self.geometry.n_readers):
            unread: set[int] | None = None
            for _, state in self.history:
                now = {s.index for s in state.slots if reader in s.unread_by}
                unread = now if unread is None else unread & now
            if unread:
                result[reader] = tuple(sorted(unread))
        return result

    @property
    def stuck_readers(self) -> tuple[int, ...]:
        """Reader indices that took nothing although something waited for them all the time."""
        return tuple(self.stuck)

    @cached_property
    def full(self) -> bool:
        """Every slot was unread by somebody in every state: the writer cannot go on."""
        return self.sampled and bool(self.history) and all(state.full for _, state in self.history)

    @cached_property
    def published(self) -> int:
        """Messages seen to be published in the window: a lower bound, polling can miss."""
        return _published(self.history)

    @cached_property
    def taken(self) -> tuple[int, ...]:
        """Messages each reader was seen to take: a lower bound."""
        counts = [0] * self.geometry.n_readers
        for (_, before), (_, after) in zip(self.history, self.history[1:], strict=False):
            for old, new in zip(before.slots, after.slots, strict=True):
                for reader in old.unread_by:
                    if reader not in new.unread_by:
                        counts[reader] += 1
        return tuple(counts)


def _published(history: tuple[tuple[float, RingState], ...]) -> int:
    """Count publications by the distance the newest message has moved, which also counts those read between two looks.

    Only a whole lap between two sightings is lost. Where the newest slot is not determined (everything is read), the
    sighting is skipped.
    """
    count, before, n = 0, None, 0
    for _, state in history:
        n = len(state.slots)
        newest = _newest(state)
        if newest is None:
            continue
        if before is not None and newest != before:
            count += (newest - before) % n
        before = newest
    return count


def _newest(state: RingState) -> int | None:
    """Slot of the newest message, where the flags tell."""
    n = len(state.slots)
    if state.problems:
        return None
    if state.writer_index is not None:
        return (state.writer_index - 1) % n
    return None


def rings_of(scene: Scene) -> tuple[Ring, ...]:
    """Every ring that members of the instance hold, in the order broadcast, response, group, unknown."""
    found = [ring for segment in scene.segments if (ring := _ring(scene, segment)) is not None]
    order = {BROADCAST: 0, RESPONSE: 1, GROUP: 2}
    place = {m.pid: i for i, m in enumerate(scene.instance.members)}
    return tuple(
        sorted(found, key=lambda r: (order.get(r.queue, 3), place.get(r.writer or 0, 0), r.segment.ino, r.segment.name))
    )


def _ring(scene: Scene, segment: Segment) -> Ring | None:
    if not segment.polls and not segment.states:
        return None
    if segment.claim is not None:
        return _claimed(scene, segment, segment.claim) if _fits(segment, segment.claim) else None
    chunk_mib = _chunk_mib(scene)
    layouts = candidates(segment.size, version=scene.version, broadcast_chunk_mib=chunk_mib)
    if not layouts:
        return None
    holders = scene.holders(segment)
    engines = [m for m in scene.engines if m.pid in holders]
    workers = [m for m in scene.workers if m.pid in holders]
    if not engines and not workers:
        return None
    queue, layout, how = _part(scene, segment, layouts, engines, workers)
    geometry = Geometry(chunks=layout.chunks, chunk_bytes=layout.chunk_bytes, n_readers=layout.n_readers)
    if geometry.metadata_bytes > min([segment.tail_bytes, *(len(s.tail) for s in segment.states)]):
        return None
    history = tuple((s.t, decode(s.tail[-geometry.metadata_bytes :], geometry.n_readers)) for s in segment.states)
    writer, readers = _parties(scene, queue, geometry, engines, workers)
    confirmed = writer is not None and _confirmed(scene, writer, holders)
    return Ring(
        segment=segment,
        queue=queue,
        geometry=geometry,
        geometry_known_by=how,
        writer=writer,
        writer_confirmed=confirmed,
        readers=readers,
        history=_merged(history),
    )


def _fits(segment: Segment, claim: RingClaim) -> bool:
    """What was written down as its flags makes whole rows of the shape that was written down beside them."""
    return claim.n_readers > 0 and all(s.tail and len(s.tail) % (1 + claim.n_readers) == 0 for s in segment.states)


def _claimed(scene: Scene, segment: Segment, claim: RingClaim) -> Ring:
    """A ring whose shape and parties are said by whoever wrote its flags down."""
    geometry = Geometry(chunks=claim.chunks, chunk_bytes=claim.chunk_bytes, n_readers=claim.n_readers)
    readers = (*claim.readers, *([None] * claim.n_readers))[: claim.n_readers]
    return Ring(
        segment=segment,
        queue=claim.queue or _part_by_parties(scene, claim),
        geometry=geometry,
        geometry_known_by="the dump",
        writer=claim.writer,
        writer_confirmed=False,
        readers=readers,
        history=_merged(tuple((s.t, decode(s.tail, claim.n_readers)) for s in segment.states)),
    )


def _part_by_parties(scene: Scene, claim: RingClaim) -> str:
    """The part a ring plays, by the roles of its writer and readers; empty where they do not tell."""
    writer = scene.members.get(claim.writer or -1)
    reads = {scene.members[pid].role for pid in claim.readers if pid in scene.members}
    if writer is None or not reads:
        return ""
    if writer.role == "EngineCore":
        return BROADCAST if reads <= {"Worker", "RayWorker"} else ""
    return RESPONSE if "EngineCore" in reads else GROUP


def _merged(history: tuple[tuple[float, RingState], ...]) -> tuple[tuple[float, RingState], ...]:
    """Drop repeats: bytes of the tail before the metadata may have changed, not the flags."""
    kept: list[tuple[float, RingState]] = []
    for t, state in history:
        if not kept or kept[-1][1] != state:
            kept.append((t, state))
    return tuple(kept)


def _chunk_mib(scene: Scene) -> int | None:
    text = scene.environ("VLLM_MQ_MAX_CHUNK_BYTES_MB")
    return int(text) if text is not None and text.isdigit() else None


def _part(
    scene: Scene, segment: Segment, layouts: tuple[Layout, ...], engines: list[Member], workers: list[Member]
) -> tuple[str, Layout, str]:
    """The part the segment plays and its geometry, from who holds it."""
    if not engines:
        group = next((x for x in layouts if x.queue == GROUP), None) if len(workers) > 1 else None
        return (GROUP, group, "size and holders") if group is not None else ("", layouts[0], "size")
    n_local = len(scene.instance.workers_of(engines[0].pid))
    broadcasts = [x for x in layouts if x.queue == BROADCAST and x.n_readers >= max(1, len(workers))]
    exact = [x for x in broadcasts if x.n_readers == max(1, n_local)]
    broadcast = next(iter(exact or broadcasts), None)
    response = next((x for x in layouts if x.queue in (RESPONSE, "remote_response") and x.n_readers == 1), None)
    if len(workers) > 1 or response is None:
        how = "size and holders" if broadcast in exact else "size; fewer holders than readers"
        return BROADCAST, broadcast or layouts[0], how
    if n_local > 1 or broadcast is None:
        return RESPONSE, response, "size and holders"
    # One worker, and both queues may have this size. The usual table decides, unless both rings of the pair are alike:
    # then the broadcast ring is the older one (made before the worker exists; inode numbers of a tmpfs grow).
    alike = [s for s in scene.segments if s.size == segment.size and scene.holders(s) == scene.holders(segment)]
    if len(alike) > 1:
        oldest = min(alike, key=lambda s: s.ino)
        return (
            (BROADCAST, broadcast, "order of creation")
            if oldest is segment
            else (RESPONSE, response, "order of creation")
        )
    return (BROADCAST, broadcast, "size") if layouts[0].queue == BROADCAST else (RESPONSE, response, "size")


def _parties(
    scene: Scene, queue: str, geometry: Geometry, engines: list[Member], workers: list[Member]
) -> tuple[int | None, tuple[int | None, ...]]:
    n = geometry.n_readers
    if queue == BROADCAST and engines:
        local = scene.instance.workers_of(engines[0].pid)
        return engines[0].pid, _by_rank([m for m in local if m in workers] or list(local), n, workers)
    if queue == RESPONSE and engines:
        writer = workers[0].pid if workers else None
        return writer, (engines[0].pid, *([None] * (n - 1)))
    if queue == GROUP and workers:
        readers = workers[1:]
        return workers[0].pid, tuple([m.pid for m in readers[:n]] + [None] * max(0, n - len(readers)))
    return None, tuple([None] * n)


def _by_rank(local: list[Member], n: int, holders: list[Member]) -> tuple[int | None, ...]:
    """Reader index of the broadcast ring is the local rank; a rank that is gone leaves its index empty."""
    if len(local) >= n:
        return tuple(m.pid for m in local[:n])
    by_rank: dict[int, int] = {}
    for member in local:
        rank = member.ranks.get("tp", member.ranks.get("pp"))
        if rank is not None:
            by_rank[rank] = member.pid
    if len(by_rank) == len(local) and by_rank and max(by_rank) < n:
        return tuple(by_rank.get(k) for k in range(n))
    return tuple([m.pid for m in holders] + [None] * (n - len(holders)))


def _confirmed(scene: Scene, writer: int, holders: frozenset[int]) -> bool:
    others = holders - {writer}
    return any(pid == writer and peers == others for pid, peers in scene.ipc_peers.values())

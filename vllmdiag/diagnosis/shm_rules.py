"""Layer 3: the room in /dev/shm as the target sees it, files removed too early, and what dead servers left there."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.shm import Segment, ShmMount
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.layouts import broadcast_ring_bytes, classify_file

from . import write
from .case import Case
from .logs import pid_words

_ALMOST_NOTHING = 1 << 20
"""A mount with less than this free cannot back the next few pages of a sparse ring."""
_LEAK_SHARE = 0.5


def shm_findings(case: Case) -> Iterator[Finding]:
    """Findings about the mounts that members see."""
    snapshot, members = case.scene.snapshot, set(case.scene.processes)
    mounts = [m for m in snapshot.shm_mounts if members & set(m.pids)]
    if snapshot.pasted and len(snapshot.shm_mounts) == 1:
        mounts = list(snapshot.shm_mounts)  # of a process of which nothing else was given
    for mount in mounts:
        yield from _room(case, mount)
    yield from _unlinked(case)
    yield from _leaks(case)


def _room(case: Case, mount: ShmMount) -> Iterator[Finding]:
    engines = [e for e in case.scene.engines if e.pid in mount.pids] or list(case.scene.instance.members[:1])
    who = engines[0]
    # A command line that was pasted without a pid is of a process that another piece names by its own.
    pid = who.pid if who.pid > 0 or not mount.pids else mount.pids[0]
    whose = f"{who.label} ({pid_words(pid)})"
    held = case.scene.segments
    n_readers = max(1, len(case.scene.workers))
    needs = broadcast_ring_bytes(n_readers, case.scene.version, _chunk_mib(case))
    makes_rings = bool(case.scene.workers) or _will_have_workers(case)
    sparse = sum(max(0, s.size - (s.resident or 0)) for s in held)
    if makes_rings and mount.size < needs:
        yield case.finding(
            "shm-too-small",
            who.pid,
            f"/dev/shm of {whose} has {_mib(mount.size)}; its broadcast ring alone needs {_mib(needs)}",
            evidence=[f"statvfs in the mount namespace of {whose}: {_mib(mount.size)}, {_mib(mount.free)} free"],
            chain=case.chain(who.pid),
        )
    elif mount.free < _ALMOST_NOTHING and sparse > mount.free:
        yield case.finding(
            "shm-exhausted",
            who.pid,
            f"/dev/shm of {whose} is full: {_mib(mount.free)} free of {_mib(mount.size)}",
            evidence=[f"{_mib(sparse)} of its {len(held)} segments are not backed: the next page touched is a SIGBUS"],
            chain=case.chain(who.pid),
        )


def outgrown(snapshot: Snapshot) -> tuple[ShmMount, tuple[Segment, ...]] | None:
    """A mount that is smaller than a ring in it (rings are sparse, so it was made all the same), and its rings."""
    rings = tuple(s for s in snapshot.segments if classify_file(s.name, s.size).ring)
    small = [m for m in snapshot.shm_mounts if any(s.size > m.size for s in rings)]
    return (small[0], rings) if small else None


def outgrown_words(mount: ShmMount, rings: tuple[Segment, ...]) -> str:
    """The same in words."""
    total = sum(s.size for s in rings)
    count = f"{len(rings)} rings may grow to {_mib(total)}" if len(rings) > 1 else f"its ring may grow to {_mib(total)}"
    return f"/dev/shm has {_mib(mount.size)}, {_mib(mount.free)} free, and {count}: a write past it is a SIGBUS"


def _unlinked(case: Case) -> Iterator[Finding]:
    """Rings in use whose file is gone. An engine that ends removes them itself: it is no longer in its loop."""
    engines = case.scene.engines
    if case.starting or not engines or any(case.acts[e.pid].seen and not case.in_loop(e) for e in engines):
        return
    gone = [
        ring
        for ring in case.rings
        if ring.segment.deleted and any(not case.dead(pid) for pid in case.scene.holders(ring.segment))
    ]
    if not gone or not all(case.in_loop(e) for e in engines):
        yield from removed_findings(case.scene.snapshot, case.scene.instance.roots[0])
        return
    holders = {pid for ring in gone for pid in case.scene.holders(ring.segment)}
    who = next((e for e in case.scene.engines if e.pid in holders), case.scene.engines[0])
    yield case.finding(
        "shm-unlinked-early",
        who.pid,
        f"{len(gone)} of {len(case.rings)} rings have no file in /dev/shm any more: those who hold them go on,"
        " nobody else can attach",
        evidence=[
            f"{ring.segment.name} ({ring.queue or 'unknown'} ring) is deleted and held by "
            + ", ".join(case.label(pid) for pid in sorted(case.scene.holders(ring.segment)))
            for ring in gone[:5]
        ],
        chain=(case.link(who.pid),),
    )


def removed_findings(snapshot: Snapshot, target: int | None = None) -> Iterator[Finding]:
    """The same told by names alone: people paste maps or descriptors, and neither sizes nor stacks with them.

    Args:
        snapshot: pasted evidence; a live look sees the loop of the engine, or has no rights to see the rings.
        target: pid for the next step.
    """
    gone = [s for s in snapshot.segments if s.deleted and s.holders and classify_file(s.name, s.size).keeps_name]
    if not snapshot.pasted or not gone:
        return
    pids = sorted({h.pid for s in gone for h in s.holders})
    process = next((p for p in snapshot.processes if p.pid == pids[0]), None)
    known = pids[0] if pids[0] > 0 else None
    who = Subject(role="Other", pid=known, label=(process.comm if process else "") or pid_words(pids[0]))
    names = ", ".join(s.path for s in gone[:3])
    yield write.finding(
        "shm-unlinked-early",
        who,
        f"{names}: in use, and without a name in /dev/shm any more: somebody has removed it; nobody else can attach",
        evidence=[
            f"{s.path} (deleted), held by {', '.join(pid_words(h.pid) for h in s.holders[:8])}" for s in gone[:5]
        ],
        chain=(Link(subject=who, doing="holds a file that was removed"),),
        confidence="medium",
        words={"target": str(target or known)} if target or known else {},
    )


def _will_have_workers(case: Case) -> bool:
    options = case.scene.options
    return options is not None and options.world_size > 1


def _chunk_mib(case: Case) -> int | None:
    text = case.scene.environ("VLLM_MQ_MAX_CHUNK_BYTES_MB")
    return int(text) if text is not None and text.isdigit() else None


def leaked(snapshot: Snapshot) -> tuple[Segment, ...]:
    """vLLM's own files that provably nobody holds."""
    return tuple(
        s
        for s in snapshot.segments
        if not s.holders and s.holders_complete and not s.deleted and classify_file(s.name, s.size).ours
    )


def _leaks(case: Case) -> Iterator[Finding]:
    leaks = leaked(case.scene.snapshot)
    if leaks:
        used = sum(s.resident or 0 for s in leaks)
        sizes = [m.size for m in case.scene.snapshot.shm_mounts] or [0]
        heavy = used > _LEAK_SHARE * max(sizes) > 0
        yield case.finding(
            "shm-full-of-leaks",
            Subject(role="Host", label="/dev/shm"),
            leak_words(leaks),
            evidence=[leak_line(s) for s in leaks[:5]],
            severity="critical" if heavy else "info",
        )


def leak_words(leaks: tuple[Segment, ...]) -> str:
    """One line about segments of dead servers."""
    used = sum(s.resident or 0 for s in leaks)
    one = len(leaks) == 1
    what = "1 segment of a dead vLLM server is" if one else f"{len(leaks)} segments of dead vLLM servers are"
    return f"{what} left in /dev/shm, {_mib(used)} resident; no process holds {'it' if one else 'them'}"


def leak_line(segment: Segment) -> str:
    """One line about one of them."""
    age = f", {segment.mtime_age_s / 60:.0f} min old" if segment.mtime_age_s is not None else ""
    size = f"{_mib(segment.size)}, {_mib(segment.resident or 0)} resident"
    return f"{segment.name}: {size}, no descriptor and no map anywhere{age}"


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n < 2**30 else f"{n / 2**30:.1f} GiB"

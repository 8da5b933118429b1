"""Layer 2: a start-up in which nothing moves. The first process that does not advance, its stage, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.startup import FileLock
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.stages import cache_settings, is_cache, is_network_filesystem, shim_in

from .case import Case
from .endpoint_rules import certain_findings, endpoint_findings, interface_faults
from .gpu_rules import at_start
from .nodes import absent, beyond_sight
from .startup import Standing, line_of, standings, start_method_words
from .startup_motion import helpers_of

_PATIENCE_S = 30.0
"""A start-up younger than this is not called stuck: a machine may just be slow to schedule it."""
_LONG_SPIN_S = 600.0
"""A process that computes in one and the same frame and is older than this may be stuck in it."""
_LONG_IMPORT_S = 60.0
_WORKING = ("EngineCore", "Worker", "RayWorker", "Child", "DPCoordinator")
_KERNEL = {
    "wait_for_partner": "in open(2) of a FIFO that nobody has opened at its other end",
    "fifo_open": "in open(2) of a FIFO that nobody has opened at its other end",
    "pipe_read": "reads from a pipe into which nobody writes",
    "anon_pipe_read": "reads from a pipe into which nobody writes",
    "hrtimer_nanosleep": "sleeps and looks again",
    "folio_wait_bit_common": "waits for a page from storage",
    "rpc_wait_bit_killable": "waits for its NFS server",
    "locks_lock_inode_wait": "waits in the kernel for a file lock",
    "flock_lock_inode_wait": "waits in the kernel for a file lock",
}
"""What a process waits for in these kernel functions."""


def startup_findings(case: Case) -> Iterator[Finding]:
    """All findings of layer 2."""
    yield from endpoint_findings(case)
    if case.starting:
        yield from certain_findings(case)
        yield from _poisoned(case)
        yield from _slow_storage(case)
        yield from _stuck(case)


def _stuck(case: Case) -> Iterator[Finding]:
    places = standings(case)
    if any(case.halted(s.pid) for s in places) or not any(case.acts[s.pid].seen for s in places):
        return  # layer 1 speaks of who is dead or stopped; a blind look proves nothing
    at_gpu = at_start(case, places)
    if at_gpu is not None:
        yield at_gpu
        return
    if case.starting_motion:
        yield from _spinning(case, places)
        return
    ages = [case.scene.processes[s.pid].age_s for s in places]
    if min((age for age in ages if age is not None), default=_PATIENCE_S) < _PATIENCE_S:
        return
    root = first_blocker(places)
    if root is not None and not _waits_for_storage(case, root):
        yield _finding(case, root, places)


def _waits_for_storage(case: Case, root: Standing) -> bool:
    """It loads, and has run a moment ago: the next bytes of a slow disk may take longer than this window."""
    since = case.since(root.pid)
    return root.stage is not None and root.stage.part == "load" and since is not None and since < _PATIENCE_S


def first_blocker(places: Sequence[Standing]) -> Standing | None:
    """The first that does not advance: it is not ready, and waits for nobody who is here. The deepest of several."""
    open_ones = [s for s in places if not s.ready]
    sinks = [s for s in open_ones if not s.on] or open_ones
    if not sinks:
        return None
    return min(sinks, key=lambda s: (s.depth, s.stage.order if s.stage is not None else 0))


def _finding(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    stage = root.stage
    if case.acts[root.pid].state == "lock":
        return _locked(case, root, places)
    if stage is not None and stage.part == "meet":
        return _meeting(case, root, places)
    if stage is not None and stage.waits_for == "ray":
        return _placement(case, root, places)
    if stage is not None and stage.part == "compile":
        held = _halted_children(case, root)
        why = held[0] if held else "compiles, and neither it nor a child of it computes"
        return _say(case, "slow-compile", root, places, why, more=held)
    if stage is not None and stage.waits_for in ("front", "coordinator", "engines", "children", "queues"):
        return _handshake(case, root, places)
    held = _halted_children(case, root)
    return _say(case, "startup-phase-stuck", root, places, held[0] if held else kernel_words(case, root.pid), more=held)


def _say(  # noqa: PLR0913  one argument for each part of the sentence
    case: Case,
    cause: str,
    root: Standing,
    places: Sequence[Standing],
    why: str = "",
    *,
    subject: Subject | None = None,
    summary: str = "",
    more: Sequence[str] = (),
    confidence: str = "",
    severity: str = "",
) -> Finding:
    """A finding about a start-up that stands: who, at which stage, since when, what the others do."""
    who = f"{root.member.label} (pid {root.pid})"
    once = case.window_s == 0
    evidence = [
        *more,
        *(line_of(case, s) for s in sorted(places, key=lambda s: s.pid != root.pid)),
        *start_method_words(case),
        "one look only: whether anything moves is not known" if once else _still_words(case),
    ]
    stage = root.words
    sure = confidence or ("medium" if once else "high")
    return case.finding(
        cause,
        subject or root.pid,
        summary or f"start-up stands at {who}: {stage}" + (f"; {why}" if why else ""),
        evidence=evidence,
        chain=_chain(case, places, root, subject),
        confidence="high" if sure == "high" else "low" if sure == "low" else "medium",
        severity="warning" if severity == "warning" else None,
        since_s=max(root.since_s or 0.0, case.window_s) or None,
    )


def _still_words(case: Case) -> str:
    return f"no CPU, no reads, no new process and no change of stacks in {case.window_s:.1f} s"


def _chain(case: Case, places: Sequence[Standing], root: Standing, end: Subject | None) -> tuple[Link, ...]:
    """From the front over those that wait down to the root, and on to who is awaited."""
    by_pid = {s.pid: s for s in places}
    before: dict[int, int | None] = {
        m.pid: None for m in case.scene.instance.of("APIServer", "Launcher", "Driver") if m.pid in by_pid
    }
    queue = deque(before)
    while queue:
        pid = queue.popleft()
        for on in by_pid[pid].on if pid in by_pid else ():
            if on not in before:
                before[on] = pid
                queue.append(on)
    path = [root.pid]
    while (above := before.get(path[0])) is not None:
        path.insert(0, above)
    links = case.chain(*path, doing={s.pid: s.words for s in places})
    if end is not None and end.pid != root.pid:
        return (*links, Link(subject=end, doing="has not come"))
    return links


def kernel_words(case: Case, pid: int) -> str:
    """What the main thread waits for: by the kernel function it sleeps in, else by its frame."""
    process = case.scene.processes[pid]
    if process.wchan in _KERNEL:
        return _KERNEL[process.wchan]
    main = case.acts[pid].main
    frame = main.frames[0] if main is not None and main.frames else None
    where = f", asleep in {process.wchan}" if process.wchan else ""
    at = f"in {frame.name} ({frame.file}:{frame.line})" if frame is not None else "its stack is not readable"
    return at + where


# -- causes -----------------------------------------------------------------------------------------------------------


def _halted_children(case: Case, root: Standing) -> list[str]:
    """Compilers and other children of its own that are stopped or dead."""
    children = [case.scene.processes[pid] for pid in helpers_of(case.scene, root.pid)]
    return [f"its child {p.comm} (pid {p.pid}) is in state {p.state}" for p in children if p.state in ("T", "t", "Z")]


def _meeting(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    """Ranks are at their meeting, and one is not there, or they do not find each other."""
    faults = interface_faults(case)
    lost = absent(case)
    if faults:
        return _say(
            case, "wrong-interface", root, places, more=faults, summary=f"ranks cannot find each other: {faults[0]}"
        )
    nccl = root.stage is not None and root.stage.id == "worker.nccl"
    if nccl and lost is None:
        return _nccl(case, root, places)
    more = beyond_sight(case, lost)
    if lost is not None:
        return _say(
            case,
            "startup-barrier",
            root,
            places,
            subject=lost,
            more=more,
            summary=f"start-up waits for {lost.label}, which has not come: {root.member.label} {root.words}",
        )
    return _say(case, "startup-barrier", root, places, "every rank that is here has come", more=more)


def _nccl(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    process = case.scene.processes[root.pid]
    preload = (case.scene.environ("LD_PRELOAD") or "").replace(":", " ").split()
    found = shim_in([*process.libraries, *preload])
    if found is not None:
        path, shim = found
        words = [f"{path} is loaded: {shim.name}, {shim.meaning}", f"known cure: {shim.next}"]
        return _say(case, "preload-shim", root, places, f"{shim.name} stands between it and the driver", more=words)
    return _say(case, "nccl-init-stuck", root, places, "every rank is there, and NCCL does not come back")


def _placement(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    lines = [f"log: {line.text}" for line in case.scene.snapshot.log_lines if _kind(case, line.text) == "ray_placement"]
    address = case.scene.environ("VLLM_HOST_IP")
    more = [*lines[-1:], *([f"VLLM_HOST_IP={address}"] if address else []), *interface_faults(case)]
    return _say(case, "ray-placement", root, places, "Ray has not given it its resources", more=more)


def _handshake(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    lost = absent(case)
    if lost is None:
        confidence = "medium"
        return _say(case, "handshake-incomplete", root, places, more=_identities(case, root), confidence=confidence)
    return _say(
        case,
        "handshake-incomplete",
        root,
        places,
        subject=lost,
        more=[*beyond_sight(case, lost), *_identities(case, root)],
        summary=f"start-up waits for {lost.label}, which has not come",
        confidence="medium",
    )


def _identities(case: Case, root: Standing) -> list[str]:
    if root.stage is None or root.stage.waits_for != "engines":
        return []
    done = [e.label for e in case.scene.engines if case.in_loop(e)]
    shown = f"ready by their stacks: {', '.join(done) or 'no engine'}"
    return [f"{shown}; which identities the front end has counted is not visible from outside (vLLM logs it at DEBUG)"]


def _locked(case: Case, root: Standing, places: Sequence[Standing]) -> Finding:
    """It waits for a lock file. Whoever holds it is alive, stopped, or gone."""
    suspects = _suspects(case, root)
    words = []
    for lock in suspects[:5]:
        age = f", untouched for {lock.age_s:.0f} s" if lock.age_s is not None else ""
        if lock.stale:
            words.append(f"{lock.path}: left behind{age}; no process has it open, so nobody will remove it")
        elif lock.holder is not None:
            state = f" ({lock.holder_state})" if lock.holder_state else ", which is gone"
            words.append(f"{lock.path}: held by {lock.holder_comm or 'pid'} {lock.holder}{state}{age}")
    only = suspects[0] if len(suspects) == 1 else None
    if only is None:
        why = (
            "waits for a lock file; which one, and who holds it, is not visible"
            if not words
            else "waits for a lock file"
        )
    elif only.stale:
        why = f"waits for {only.path}, which a dead process left behind"
    else:
        why = f"waits for {only.path}, held by {only.holder_comm or 'pid'} {only.holder}"
    alive = only is not None and not only.stale and only.holder_state in ("R", "S", "D", "I")
    return _say(
        case,
        "jit-lock",
        root,
        places,
        why,
        more=words or [_no_lock(case)],
        confidence="high" if only is not None else "medium",
        severity="warning" if alive else "",
    )


def _no_lock(case: Case) -> str:
    if case.scene.snapshot.pasted:
        return "what would decide it: the lock files of the cache, who has them open (fuser), and /proc/locks"
    return "no lock of a cache was found in /proc/locks, nor a lock file left behind"


def _suspects(case: Case, root: Standing) -> list[FileLock]:
    """The locks it may wait for: one whose queue it stands in, else those in caches it is told to use, else any."""
    locks = [lock for lock in case.scene.snapshot.locks if lock.holder != root.pid]
    waiting = [lock for lock in locks if root.pid in lock.waiters]
    told = [place for name in cache_settings() if (place := case.scene.environ(name))]
    inside = [lock for lock in locks if any(lock.path.startswith(place.rstrip("/") + "/") for place in told)]
    caches = [lock for lock in locks if is_cache(lock.path)]
    return waiting or inside or caches or locks


def _spinning(case: Case, places: Sequence[Standing]) -> Iterator[Finding]:
    """Something computes, but for a long time, alone, and in one frame: a kernel that never ends looks so."""
    movers = [s for s in places if s.motion]
    if len(movers) != 1 or len(movers[0].motion) != 1:
        return
    (mover,) = movers
    act, process = case.acts[mover.pid], case.scene.processes[mover.pid]
    late = process.age_s is not None and process.age_s > _LONG_SPIN_S
    # A compiler and a loader may well be in one frame for long; a warm-up, a profile or a capture is not.
    runs = mover.stage is not None and mover.stage.part == "run"
    if late and runs and act.on_cpu and act.main is not None and act.main.still:
        yield _say(
            case,
            "startup-phase-stuck",
            mover,
            places,
            f"it computes, but in one frame: {act.doing}",
            more=[f"{act.cpu:.1f} cores, the same frames in {len(act.main.stacks)} of {act.main.dumps} stacks"],
            confidence="low",
            severity="warning",
        )


def _poisoned(case: Case) -> Iterator[Finding]:
    """CUDA was initialised before the fork: the child cannot use it."""
    lines = [line.text for line in case.scene.snapshot.log_lines if _kind(case, line.text) == "fork_cuda"]
    if lines:
        place = next((s for s in standings(case) if s.member.role in _WORKING), standings(case)[0])
        yield _say(
            case,
            "cuda-fork-poisoned",
            place,
            standings(case),
            summary=f"{place.member.label} was forked from a process that had initialised CUDA",
            more=[f"log: {lines[-1]}"],
        )


def _slow_storage(case: Case) -> Iterator[Finding]:
    """Somebody still imports from a network file system while others count the seconds."""
    late = [line.text for line in case.scene.snapshot.log_lines if _kind(case, line.text) == "coordinator_late"]
    for place in standings(case):
        process = case.scene.processes[place.pid]
        if place.stage is None or place.stage.part != "import" or not (process.age_s or 0) > _LONG_IMPORT_S:
            continue
        if late or is_network_filesystem(process.import_filesystem):
            kind = process.import_filesystem or "its file system"
            yield _say(
                case,
                "handshake-timeout-slow-storage",
                place,
                standings(case),
                summary=f"{place.member.label} (pid {place.pid}) still imports after {process.age_s:.0f} s from {kind}",
                more=[f"log: {text}" for text in late[-1:]],
                severity="warning",
            )
            return


def _kind(case: Case, text: str) -> str:
    found = find(text, case.scene.version)
    return found.kind.id if found is not None else ""

"""Where each process of a start-up stands: its stage, whether it moves, how far it is, and for whom it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.stages import READY_ORDER, Stage, stage_of, start_method

from .activity import WAITING
from .case import Case
from .progress import progress_words

_SERVERS = ("APIServer", "Launcher", "Driver")
_WORKERS = ("Worker", "RayWorker")
_TELLING = ("", "collective", "lock", "gpu_wait", "busy", "download")
"""States whose words say more than the stage does."""
_ASIDE = ("Helper", "ResourceTracker")
_DEPTH = {"Worker": 0, "RayWorker": 0, "EngineCore": 1, "Child": 2, "DPCoordinator": 3}


@dataclass(frozen=True)
class Standing:
    """One member of a start-up."""

    member: Member
    stage: Stage | None
    """None where its stack is not readable or shows none: the interpreter itself is starting."""
    motion: tuple[str, ...]
    """What shows that it advances, in words; empty where nothing does."""
    progress: str
    """How far it is, in words: ``shard 2 of 4, 45.0 MB/s read``; empty where nothing tells."""
    on: tuple[int, ...]
    """Members that it waits for."""
    since_s: float | None
    """For how long it has not run; None where it moves or the kernel does not tell."""

    @property
    def pid(self) -> int:
        """Of the member."""
        return self.member.pid

    @property
    def depth(self) -> int:
        """How near to the work it is: workers 0, then engines, untitled children, the coordinator, servers."""
        return _DEPTH.get(self.member.role, 4)

    @property
    def ready(self) -> bool:
        """It has done its part of the start-up."""
        return self.stage is not None and self.stage.order >= READY_ORDER

    @property
    def words(self) -> str:
        """The stage and how far it is: ``loads weights: shard 2 of 4``."""
        name = self.stage.name if self.stage is not None else "starts: no stage visible yet"
        return f"{name}: {self.progress}" if self.progress else name


@lru_cache(maxsize=1)
def standings(case: Case) -> tuple[Standing, ...]:
    """Every member that takes part in the start-up, in tree order."""
    members = [m for m in case.scene.instance.members if m.role not in _ASIDE]
    stages = {m.pid: _stage(case, m) for m in members}
    return tuple(
        Standing(
            member=m,
            stage=stages[m.pid],
            motion=(moves := case.motion[m.pid]),
            progress=progress_words(case, m, stages),
            on=_waits_on(case, m, stages),
            since_s=None if moves else case.since(m.pid),
        )
        for m in members
    )


def phase_of(places: Sequence[Standing]) -> str:
    """The deepest members that advance, with stage, progress and speed; empty where none does."""
    moving = [s for s in places if s.motion and not s.ready]
    depth = min((s.depth for s in moving), default=4)
    deepest = [s for s in moving if s.depth == depth]
    same: dict[str, list[str]] = {}
    for s in deepest:
        same.setdefault(s.words, []).append(s.member.label)
    speed = next((f" ({w})" for s in deepest for w in s.motion if w.endswith("read")), "")
    return "; ".join(f"{', '.join(labels)} {words}" for words, labels in same.items()) + speed if same else ""


def stage_evidence(case: Case, pid: int) -> list[str]:
    """The stage at which a process of a start-up was stopped, where its stack shows it; nothing afterwards."""
    # A stopped server says nothing of whether it starts: only its own stack does.
    place = standing_of(case, pid) if case.starting or not case.listening else None
    told = place is not None and place.stage is not None and not place.ready
    return [f"stage of its start-up: {place.words}"] if place is not None and told else []


def stages_left(case: Case) -> list[str]:
    """The stages of those that live, after a death in the start-up: the dead one was at the same or just before."""
    if not case.starting:
        return []
    return [line_of(case, s) for s in standings(case) if not case.dead(s.pid) and s.stage is not None]


def standing_of(case: Case, pid: int) -> Standing | None:
    """The standing of one member; None for a helper."""
    return next((s for s in standings(case) if s.pid == pid), None)


def line_of(case: Case, standing: Standing) -> str:
    """One line of evidence: name, stage, progress, and what moves or that nothing does."""
    act = case.acts[standing.pid]
    words = standing.words
    if case.halted(standing.pid):
        return f"{standing.member.label} (pid {standing.pid}) is {act.doing}; stage: {words}"
    detail = act.doing if act.seen and act.state in _TELLING and act.doing not in words else ""
    still = f"does not move, asleep for {standing.since_s:.0f} s" if standing.since_s else "does not move"
    tail = ", ".join(standing.motion) or ("" if standing.ready or not case.window_s else still)
    return f"{standing.member.label} (pid {standing.pid}): " + "; ".join(w for w in (words, detail, tail) if w)


def _stage(case: Case, member: Member) -> Stage | None:
    """The stage of the last look; while a process only imports, the title and the place in the tree add nothing."""
    main = case.acts[member.pid].main
    stacks = main.stacks if main is not None else ()
    return stage_of(stacks[-1].frames, member.role, case.scene.version) if stacks else None


# -- waits ------------------------------------------------------------------------------------------------------------


def start_method_words(case: Case) -> list[str]:
    """How the children were started (fork or spawn), how that is known, and why vLLM chose it, where its log says."""
    by_method: dict[str, list[str]] = {}
    for member in case.scene.instance.of("EngineCore", *_WORKERS):
        main = case.acts[member.pid].main
        method = start_method(main.frames) if main is not None else ""
        if method:
            by_method.setdefault(method, []).append(member.label)
    words = [
        f"started by {method}: {', '.join(labels)} (their stacks begin so)" for method, labels in by_method.items()
    ]
    for line in case.scene.snapshot.log_lines:
        found = find(line.text, case.scene.version)
        if found is not None and found.kind.id == "start_method":
            words.append(f"vLLM chose spawn by itself: {found.groups['reason']}")
            break
    return words


def _waits_on(case: Case, member: Member, stages: dict[int, Stage | None]) -> tuple[int, ...]:
    """The members that this one cannot go on without. Empty where it waits for nobody who is here."""
    stage = stages[member.pid]
    if stage is None or case.halted(member.pid):
        return ()
    instance = case.scene.instance
    lock = lock_holder(case, member)
    if lock is not None:
        return (lock,)

    def before(members: tuple[Member, ...], order: int) -> tuple[int, ...]:
        return tuple(m.pid for m in members if m.pid != member.pid and _order(stages.get(m.pid)) < order)

    workers = instance.workers_of(member.pid)
    if stage.waits_for == "engines":
        return before(_engines_or_children(case, member), READY_ORDER)
    if stage.waits_for == "children":
        return before(tuple(m for m in instance.members if m.parent_pid == member.pid and m.pid in stages), READY_ORDER)
    if stage.waits_for == "coordinator":
        return before(instance.of("DPCoordinator"), READY_ORDER)
    if stage.waits_for == "front":
        return before(instance.of(*_SERVERS), stage.order)
    if stage.waits_for == "workers" and case.acts[member.pid].kind == WAITING:
        return before(workers, READY_ORDER)
    if stage.waits_for == "queues":
        mates = _mates(case, member)
        engine = tuple(m for m in instance.of("EngineCore") if m.pid == member.engine_pid)
        return before(mates, stage.order) or before(engine, 45)
    if stage.waits_for == "calls":
        engine = tuple(m for m in instance.of("EngineCore") if m.pid == member.engine_pid)
        return before(engine, READY_ORDER)
    if stage.waits_for == "ranks" or case.acts[member.pid].state == "collective":
        return tuple(m.pid for m in _mates(case, member) if not _with(case, member, m, stages))
    return ()


def _engines_or_children(case: Case, member: Member) -> tuple[Member, ...]:
    """EngineCores; where none is known to be one yet, the untitled children that may become some."""
    return case.scene.engines or tuple(m for m in case.scene.instance.of("Child") if m.parent_pid == member.pid)


def _mates(case: Case, member: Member) -> tuple[Member, ...]:
    """The other ranks of its engine, also on a second node of the same machine."""
    if member.engine_pid is not None:
        group = case.scene.instance.workers_of(member.engine_pid)
    elif member.role in _WORKERS:
        group = tuple(m for m in case.scene.workers if m.engine_pid is None)
    else:
        group = case.scene.engines  # engines of a data-parallel group meet each other
    return tuple(m for m in group if m.pid != member.pid)


def _with(case: Case, member: Member, other: Member, stages: dict[int, Stage | None]) -> bool:
    """The other one is at the same meeting, or past it."""
    mine, theirs = stages[member.pid], stages.get(other.pid)
    if mine is None or theirs is None or case.halted(other.pid):
        return False
    if mine.part == "meet":
        return theirs.part == "meet" or theirs.order > mine.order
    return case.acts[other.pid].state == "collective"


def _order(stage: Stage | None) -> int:
    return stage.order if stage is not None else 0


def lock_holder(case: Case, member: Member) -> int | None:
    """The member that holds the file lock which this one waits for, where that can be told."""
    if case.acts[member.pid].state != "lock":
        return None
    holders = {lock.holder for lock in case.scene.snapshot.locks} - {member.pid}
    mine = [pid for pid in holders if pid in case.scene.members and case.acts[pid].state != "lock"]
    return mine[0] if len(mine) == 1 else None

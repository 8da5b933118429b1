"""Ranks that work together, at the GPU: where each stands, which device it has, and what shows that nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllmdiag.model.diagnosis import Confidence, Finding, Subject
from vllmdiag.model.gpu import Accelerator
from vllmdiag.model.process import Frame
from vllmdiag.model.ranks import fold
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.signatures import Match, match, state_of

from .activity import Activity, ThreadView
from .case import Case
from .devices import device_of, seems_spinning
from .glimpse import AGAIN
from .motion import counters_moved
from .waits import path_to

COLLECTIVE, GPU, IDLE, AWAY, BLIND = "collective", "gpu", "idle", "away", "blind"
KV = frozenset(["kvconn", "kvconn.library"])
_MODEL_RUNS = frozenset(["stage.execute", "stage.warmup", "cuda.graph_capture", "nccl.first"])
_OWN_STATES = frozenset(["loading", "lock", "download", "import", "wait_start", "wait_readers"])
_OUTER = frozenset(["worker.busy", "engine.busy", "stage.execute", "stage.warmup", "cuda.graph_capture"])
"""Frames from which outwards every rank of a group is the same."""
_NAMED = 3


@dataclass(frozen=True)
class Rank:
    """One rank: the thread of it that waits, and where."""

    member: Member
    act: Activity
    place: str
    """``collective``, ``gpu`` (waits for its GPU, no collective in the stack), ``idle``, ``away``, ``blind``."""
    found: tuple[Match, ...]
    """What its stack shows, innermost first."""
    thread: ThreadView | None
    device: Accelerator | None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.member.pid

    @property
    def label(self) -> str:
        """Name and pid."""
        return f"{self.member.label} (pid {self.pid})"

    @cached_property
    def ids(self) -> frozenset[str]:
        """Signatures in its stack."""
        return frozenset(m.signature.id for m in self.found)

    @property
    def still(self) -> bool:
        """The same in every look, at least two."""
        if self.thread is None:
            return False
        return self.act.still if self.thread is self.act.main else self.thread.still

    @property
    def changes(self) -> bool:
        """Looks differ."""
        return self.thread is not None and len(self.thread.stacks) > 1 and not self.still

    @property
    def own_business(self) -> bool:
        """It is not in a step of the model: it loads, compiles, waits for a lock, or runs a method of the user."""
        if self.act.state in _OWN_STATES or self.act.signature.startswith("jit."):
            return True
        return self.place == AWAY and not self.ids & _MODEL_RUNS

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """Of the last look, innermost first."""
        return self.thread.frames if self.thread is not None else ()

    @cached_property
    def path(self) -> tuple[tuple[str, str, int], ...]:
        """Frames between the wait and the step: which part of the model it is in."""
        waits = [m.depth for m in self.found if m.signature.kind in ("collective", "gpu_wait")]
        ends = [m.depth for m in self.found if m.signature.id in _OUTER]
        inner, outer = max(waits, default=-1) + 1, min((d for d in ends if d > max(waits, default=-1)), default=None)
        return tuple((f.name, f.file, f.line) for f in self.frames[inner:outer])

    @property
    def at(self) -> str:
        """The innermost frame of the project's own code, in words."""
        frame = next((f for f in self.frames if f.file.startswith("vllm/") or "/vllm/" in f.file), None)
        frame = frame or next(iter(self.frames), None)
        return f"{frame.name} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" if frame is not None else self.act.doing


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one engine (or engines that run the model themselves, or workers whose engine is not seen)."""

    case: Case
    ranks: tuple[Rank, ...]
    engine: Member | None = None

    @property
    def seen(self) -> tuple[Rank, ...]:
        """Ranks whose stack is known."""
        return tuple(r for r in self.ranks if r.place != BLIND)

    def of(self, *places: str) -> tuple[Rank, ...]:
        """Ranks at these places."""
        return tuple(r for r in self.ranks if r.place in places)

    def at(self, *ids: str) -> tuple[Rank, ...]:
        """Ranks whose stack shows one of these signatures."""
        return tuple(r for r in self.ranks if r.ids & set(ids))

    @cached_property
    def spinning(self) -> bool | None:
        """The GPU of every rank runs a kernel that only waits; None where not known of one."""
        found = [seems_spinning(r.device) if r.device is not None else None for r in self.ranks]
        return False if False in found else None if None in found or not found else True

    @cached_property
    def stands(self) -> tuple[str, ...]:
        """What shows that nothing moves, in words; empty where there was one look only."""
        words = []
        waiting = self.of(COLLECTIVE, GPU)
        if waiting and all(r.still for r in waiting):
            looks = min(len(r.thread.stacks) for r in waiting if r.thread is not None)
            words.append(f"the same frames in {looks} of {looks} looks")
        counted = counters_moved(self.case.scene.snapshot)
        if counted is False:
            words.append("no counter of /metrics moved between two scrapes")
        for line in self.case.scene.snapshot.log_lines:
            known = find(line.text, self.case.scene.version)
            if known is not None and known.kind.id == "long_wait":
                words.append(f"log: no block of the ring for {known.groups['seconds']} s")
                break
        return tuple(words)

    @property
    def remote(self) -> int:
        """Ranks that are on other nodes, by the arguments."""
        options = self.case.scene.options
        if options is None or options.nnodes <= 1:
            return 0
        return max(0, options.world_size - len(self.ranks))

    def sure(self, corroborated: bool = True) -> Confidence:
        """High where something shows that nothing moves, and a second kind of evidence agrees."""
        return "high" if self.stands and corroborated else "medium"

    def names(self, ranks: Sequence[Rank]) -> str:
        """Their names, folded where they are many."""
        labels = {r.member.label for r in self.ranks}
        if len(labels) < len(self.ranks):  # Ray gives every worker the same name
            return f"rank{'s' if len(ranks) > 1 else ''} {fold(self.ranks.index(r) for r in ranks)}"
        if len(ranks) <= _NAMED:
            return ", ".join(r.member.label for r in ranks)
        return f"{len(ranks)} ranks ({fold(self.ranks.index(r) for r in ranks)})"

    def lines(self) -> list[str]:
        """What each group of equal ranks does, one line each."""
        groups: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            doing = rank.act.doing if rank.place == BLIND else f"{rank.act.doing}, at {rank.at}"
            groups.setdefault(doing, []).append(rank)
        return [f"{self.names(ranks)}: {doing}" for doing, ranks in groups.items()]

    def device_words(self) -> list[str]:
        """Load of the GPUs of the ranks, one line."""
        last = [r.device.readings[-1] for r in self.ranks if r.device is not None and r.device.readings]
        load = sorted({f"{x.busy_pct} %" for x in last if x.busy_pct is not None})
        memory = sorted({f"{x.memory_busy_pct} %" for x in last if x.memory_busy_pct is not None})
        power = [x.power_w for x in last if x.power_w is not None]
        if not load:
            return []
        words = f"{len(last)} GPU{'s' if len(last) > 1 else ''}: busy {'/'.join(load)}"
        words += f", memory traffic {'/'.join(memory)}" if memory else ""
        low, high = (f"{min(power):.0f}", f"{max(power):.0f}") if power else ("", "")
        words += f", {low if low == high else f'{low}-{high}'} W" if power else ""
        return [words + (": a kernel waits, it does not compute" if self.spinning else "")]

    def say(
        self,
        slug: str,
        root: Rank | Subject,
        summary: str,
        evidence: Sequence[str] = (),
        confidence: Confidence = "medium",
        **more: Any,
    ) -> Finding:
        """A finding with what all ranks do, what their GPUs do, and what shows that nothing moves."""
        case = self.case
        outstanding = case.progress[self.engine.pid].outstanding[:2] if self.engine is not None else ()
        once = [] if self.stands else [AGAIN]
        pid = root.pid if isinstance(root, Rank) else (self.engine or self.ranks[0].member).pid
        return case.finding(
            slug,
            root.pid if isinstance(root, Rank) else root,
            summary,
            evidence=[*evidence, *self.lines()[:6], *self.device_words(), *self.stands, *outstanding, *once],
            chain=case.chain(*path_to(case, pid)),
            confidence=confidence,
            **more,
        )


def group_of(case: Case, members: Sequence[Member], engine: Member | None = None) -> Group:
    """The group of these members."""
    return Group(case, tuple(_rank(case, m) for m in members), engine)


def _rank(case: Case, member: Member) -> Rank:
    act = case.acts[member.pid]
    device, _ = device_of(case.scene, case.scene.processes[member.pid])
    thread = act.main
    if act.state in ("idle", "wait_response", ""):
        # With asynchronous scheduling the main thread rests, and the thread that copies the output waits for the GPU.
        thread = next((t for t in act.threads if t is not act.main and _on_gpu(t, member.role)), act.main)
    found = match(thread.frames, member.role) if thread is not None else ()
    return Rank(member, act, _place(act, thread, found, device), found, thread, device)


def _on_gpu(thread: ThreadView, role: str) -> bool:
    found = [state_of(stack.frames, role) for stack in thread.stacks]
    return bool(found) and all(one is not None and one.signature.kind == "gpu_wait" for one in found)


def _place(act: Activity, thread: ThreadView | None, found: Sequence[Match], device: Accelerator | None) -> str:
    if not act.seen or thread is None:
        return BLIND
    if thread is not act.main:
        return GPU
    ids = {m.signature.id for m in found}
    inside = any(m.signature.kind == "collective" for m in found) or "nccl.first" in ids
    if act.state == "collective" or (act.state == "gpu_wait" and inside):
        return COLLECTIVE
    if act.state == "gpu_wait":
        return GPU
    if act.state == "idle":
        return IDLE
    # Kernels are launched ahead: a host that stands in the middle of a step, its GPU spinning, waits for it.
    spins = device is not None and seems_spinning(device)
    own = act.state in _OWN_STATES or act.signature.startswith("jit.") or act.signature in KV
    if spins and ids & _MODEL_RUNS and not own:
        return COLLECTIVE if inside else GPU
    return AWAY

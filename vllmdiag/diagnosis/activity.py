"""What each process does now: running, waiting (on what), idle, stopped, dead or uninterruptible.

Drawn from the state in /proc, the signatures of its stacks and the CPU of its main thread, each over the whole window:
a state that does not hold in every sample is motion, not a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Frame, Process, StackDump, ThreadSample, ThreadStack
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.signatures import Match, state_of

STOPPED, DEAD, UNINTERRUPTIBLE = "stopped", "dead", "uninterruptible"
RUNNING, WAITING, IDLE, UNKNOWN = "running", "waiting", "idle", "unknown"

WAIT_KINDS = frozenset(["wait_response", "wait_readers", "wait_start", "collective", "gpu_wait", "lock", "download"])
_BUSY_CORE = 0.5
"""A thread that used at least this share of a core over the window was on CPU, not asleep."""


@dataclass(frozen=True)
class ThreadView:
    """One Python thread over the dumps of the window."""

    name: str
    tid: int | None
    stacks: tuple[ThreadStack, ...]
    dumps: int
    """Dumps that could be taken at all."""
    cpu: float | None
    """Cores it used over the window."""

    @property
    def still(self) -> bool:
        """The same functions in every dump, at least two; all modules that are imported have one name: by file."""
        frames = [tuple((f.name, f.file) for f in s.frames) for s in self.stacks]
        return len(frames) >= 2 and len(frames) == self.dumps and len(set(frames)) == 1

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Frames of the last dump, innermost first."""
        return self.stacks[-1].frames if self.stacks else ()


@dataclass(frozen=True)
class Activity:
    """What one member does."""

    pid: int
    kind: str
    """One of running, waiting, idle, stopped, dead, uninterruptible, unknown."""
    state: str = ""
    """Kind of the signature that decided (idle, wait_response, collective, ...); empty where no stack was seen."""
    signature: str = ""
    doing: str = ""
    """In a few words, for people: ``all_reduce``, ``waits for replies of its workers``, ``stopped (T)``."""
    frame: Frame | None = None
    """The frame that decided."""
    still: bool = False
    """Its main thread showed the same frames in every dump."""
    cpu: float = 0.0
    """Cores used over the window by its main thread (by the process where threads were not read)."""
    starved: float = 0.0
    """Share of the window that its main thread stood in the queue for a processor."""
    seen: bool = False
    """Its stack could be read at least once."""
    main: ThreadView | None = None
    threads: tuple[ThreadView, ...] = ()

    @property
    def on_cpu(self) -> bool:
        """It computes, or spins."""
        return self.cpu >= _BUSY_CORE

    @property
    def wants_cpu(self) -> bool:
        """It computes, or would if it got a processor."""
        return self.cpu + self.starved >= _BUSY_CORE

    def thread(self, part: str) -> ThreadView | None:
        """The Python thread whose name contains `part`."""
        return next((t for t in self.threads if part in t.name), None)


def activity_of(process: Process, member: Member, window_s: float) -> Activity:
    """Judge one member over the window."""
    return replace(_activity(process, member, window_s), starved=_starved(process))


def _starved(process: Process) -> float:
    delays = [(s.t, s.run_delay) for s in process.samples if s.run_delay is not None and s.state]
    if len(delays) < 2 or delays[-1][0] <= delays[0][0]:
        return 0.0
    return ((delays[-1][1] or 0.0) - (delays[0][1] or 0.0)) / (delays[-1][0] - delays[0][0])


def _activity(process: Process, member: Member, window_s: float) -> Activity:
    threads = _threads(process, window_s)
    main = next((t for t in threads if t.tid == process.pid), None) or next(
        (t for t in threads if t.name == "MainThread"), None
    )
    cpu = _main_cpu(process, main, window_s)
    hard = _hard_state(process)
    if hard is not None:
        kind, doing = hard
        return Activity(
            pid=process.pid, kind=kind, doing=doing, cpu=cpu, seen=main is not None, main=main, threads=threads
        )
    if main is None or not main.stacks:
        return Activity(pid=process.pid, kind=UNKNOWN, doing="not visible", cpu=cpu, threads=threads)
    decided = [state_of(stack.frames, member.role) for stack in main.stacks]
    found = [(stack, match) for stack, match in zip(main.stacks, decided, strict=True) if match is not None]
    if not found:
        frame = main.frames[0] if main.frames else None
        doing = _words(frame) or "no Python frame"
        return Activity(
            pid=process.pid,
            kind=RUNNING,
            doing=doing,
            frame=frame,
            still=main.still,
            cpu=cpu,
            seen=True,
            main=main,
            threads=threads,
        )
    # A look that pauses nobody may be torn, and a spin passes through many frames: what most looks show is the state.
    counts = Counter(match.signature.kind for _, match in found)
    state = max(counts, key=lambda k: (counts[k], k == found[-1][1].signature.kind))
    looks = [(stack, match) for stack, match in found if match.signature.kind == state]
    stack, last = looks[-1]
    kind = RUNNING
    if len(looks) == len(decided):
        kind = IDLE if state == "idle" else WAITING if state in WAIT_KINDS else RUNNING
    frame = stack.frames[last.depth] if last.depth < len(stack.frames) else None
    return Activity(
        pid=process.pid,
        kind=kind,
        state=state,
        signature=last.signature.id,
        doing=_doing(state, last.signature.meaning, frame, stack.frames[0] if stack.frames else None),
        frame=frame,
        still=_waits_still(looks, main) if kind in (IDLE, WAITING) else main.still,
        cpu=cpu,
        seen=True,
        main=main,
        threads=threads,
    )


def _waits_still(looks: Sequence[tuple[ThreadStack, Match]], main: ThreadView) -> bool:
    """The same wait in every look: the frames inside it, where it spins or polls, do not count."""
    outward = {tuple(f.name for f in stack.frames[match.depth :]) for stack, match in looks}
    return len(looks) >= 2 and len(looks) == main.dumps and len(outward) == 1


def _hard_state(process: Process) -> tuple[str, str] | None:
    """A state that the kernel states, whatever the stacks say. It must hold in every sample."""
    states = [s.state for s in process.samples]
    if not states:
        return None
    if states[-1] in ("", "X"):
        return DEAD, "gone"
    if states[-1] == "Z":
        return DEAD, "dead (Z), not reaped by its parent"
    if process.cgroup is not None and not isinstance(process.cgroup, Missing) and process.cgroup.frozen:
        return STOPPED, "frozen by its cgroup"
    if all(s in ("T", "t") for s in states):
        by = f", traced by {process.tracer_pid}" if process.tracer_pid else ""
        return STOPPED, f"stopped ({states[-1]}{by})"
    if all(s == "D" for s in states) and process.cpu_s == 0 and not _reads(process):
        return UNINTERRUPTIBLE, f"uninterruptible (D{f' in {process.wchan}' if process.wchan else ''})"
    return None


def _reads(process: Process) -> bool:
    """Bytes came from storage within the window: it sleeps in D for each of them, and that is no fault."""
    first, last = process.samples[0].read_bytes, process.samples[-1].read_bytes
    return first is not None and last is not None and last > first


def _threads(process: Process, window_s: float) -> tuple[ThreadView, ...]:
    dumps: list[tuple[StackDump, tuple[ThreadStack, ...]]] = [
        (d, d.threads) for d in process.stacks if not isinstance(d.threads, Missing)
    ]
    order: dict[object, None] = {}
    seen: dict[object, list[ThreadStack]] = {}
    for _, threads in dumps:
        for stack in threads:
            key = stack.tid if stack.tid is not None else stack.name
            order.setdefault(key)
            seen.setdefault(key, []).append(stack)
    cpu = {t.tid: _thread_cpu(t.samples, window_s) for t in process.threads}
    return tuple(
        ThreadView(
            name=seen[key][-1].name,
            tid=seen[key][-1].tid,
            stacks=tuple(seen[key]),
            dumps=len(dumps),
            cpu=cpu.get(seen[key][-1].tid or -1),
        )
        for key in order
    )


def _thread_cpu(samples: Sequence[ThreadSample], window_s: float) -> float | None:
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    used = (last.utime + last.stime) - (first.utime + first.stime)
    span = last.t - first.t
    return float(used / (span or window_s or 1.0))


def _main_cpu(process: Process, main: ThreadView | None, window_s: float) -> float:
    if main is not None and main.cpu is not None:
        return main.cpu
    own = next((t for t in process.threads if t.tid == process.pid), None)
    if own is not None and (cpu := _thread_cpu(own.samples, window_s)) is not None:
        return cpu
    return process.cpu_s / window_s if window_s else 0.0


_SHORT = {
    "idle": "idle",
    "wait_response": "waits for a reply",
    "wait_readers": "waits for the readers of a full ring",
    "gpu_wait": "waits for the GPU",
}


def _words(frame: Frame | None) -> str:
    return "" if frame is None else f"in {frame.name} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})"


def _doing(state: str, meaning: str, frame: Frame | None, innermost: Frame | None) -> str:
    """A few words for a chain or a table."""
    if state == "collective" and frame is not None:
        return frame.name.rsplit(".", 1)[-1]
    if state == "busy":
        return _words(innermost)
    return _SHORT.get(state, meaning)


def same_stack(dumps: Sequence[ThreadStack]) -> int:
    """How many of the dumps show the frames of the last one, by name."""
    if not dumps:
        return 0
    last = [f.name for f in dumps[-1].frames]
    return sum([f.name for f in d.frames] == last for d in dumps)

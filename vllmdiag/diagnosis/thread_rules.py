"""Layer 3: what is wrong with an engine's socket threads or with the flags of a ring, whether or not work moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllmdiag.model.diagnosis import Finding
from vllmdiag.model.process import Frame
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.threads import expected, is_thread

from .activity import IDLE, STOPPED, ThreadView
from .case import Case
from .motion import unanswered
from .output_rules import sending, unread_outputs


def thread_findings(case: Case, engine: Member) -> Iterator[Finding]:
    """The engine's socket threads: gone, or stuck outside their poll."""
    act = case.acts[engine.pid]
    if act.main is None or not case.in_loop(engine) or act.kind == STOPPED:
        return
    waited = unanswered(case.scene) if act.main.dumps == 1 else []
    if act.main.dumps < 2 and not waited:
        return
    wanted = [t for t in expected("EngineCore", case.scene.version) if t.required]
    for part in ("process_input", "process_output"):
        kinds = [t for t in wanted if t.function is not None and t.function.startswith(part)]
        views = [v for v in act.threads if any(is_thread(v.stacks[-1], kind) for kind in kinds)]
        # People paste the main thread alone: that another one is gone is told by a dump that shows the rest.
        partial = case.scene.snapshot.pasted and not any(t.name and "process_" in t.name for t in act.threads)
        if kinds and not views and not partial:
            yield case.finding(
                "input-thread-dead",
                engine.pid,
                f"{engine.label} (pid {engine.pid}) has no thread {kinds[-1].function} any more",
                evidence=[f"threads seen in {act.main.dumps} dumps: " + ", ".join(t.name for t in act.threads)],
                chain=case.chain(engine.pid),
                confidence="high" if case.scene.version else "medium",
            )
        # A send that waits for a server which does not read is that server's fault, not the thread's.
        held = sending(case, engine) if unread_outputs(case, engine) else None
        for view in views:
            if view is not held and (view.still or waited) and act.kind == IDLE and not at_rest(view.frames):
                yield _stuck_thread(case, engine, view)


def _stuck_thread(case: Case, engine: Member, view: ThreadView) -> Finding:
    top = view.frames[0]
    return case.finding(
        "input-thread-stuck",
        engine.pid,
        f"thread {view.name} of {engine.label} (pid {engine.pid}) is stuck in {top.name}",
        evidence=[
            f"{top.name} ({top.file}:{top.line}) in {view.dumps} of {view.dumps} dumps"
            + (f", {view.cpu:.2f} cores" if view.cpu is not None else ""),
            *case.progress[engine.pid].outstanding[:3],
            *unanswered(case.scene)[:1],
        ],
        chain=case.chain(engine.pid),
        confidence="high" if view.still else "medium",
    )


_REST = ("poll", "recv", "recv_multipart", "wait", "get", "select")


def at_rest(frames: Sequence[Frame]) -> bool:
    """It sleeps in its own poll or queue: the innermost frame is a wait, right above the thread's own function."""
    depth = next((i for i, f in enumerate(frames) if "process_" in f.name and "_socket" in f.name), len(frames))
    return depth == 0 or frames[0].name.rsplit(".", 1)[-1] in _REST


def ring_findings(case: Case) -> Iterator[Finding]:
    """Rings whose flags no look showed sound."""
    for ring in case.rings:
        if ring.sampled and ring.history and all(state.problems for _, state in ring.history):
            problem = ring.history[-1][1].problems[0]
            yield case.finding(
                "ring-inconsistent",
                ring.writer or case.scene.instance.roots[0],
                f"{ring.segment.name}: {problem}",
                evidence=[f"{ring.segment.polls} looks, geometry from {ring.geometry_known_by}"],
                confidence="medium",
                severity="warning" if not ring.queue else "critical",
            )

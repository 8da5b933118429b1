"""Start, inject, diagnose, compare: one fault, or all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.sources.collect import collect

from .faults import Fault
from .inject import inject
from .server import Lab, Shape

Say = Callable[[str], None]
WINDOW_S = 3.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one fault."""

    fault: Fault
    diagnosis: Diagnosis | None = None
    """None where it could not be run here."""
    skipped: str = ""
    """What this machine lacks for it."""
    wall_s: float = 0.0

    @property
    def misses(self) -> tuple[str, ...]:
        """In what the diagnosis is wrong; empty where it is right, or where there is none."""
        return self.fault.misses(self.diagnosis) if self.diagnosis is not None else ()

    @property
    def got(self) -> str:
        """The verdict in one line: cause, layer, subject, confidence."""
        if self.diagnosis is None:
            return ""
        verdict = self.diagnosis.verdict
        return f"{verdict.cause} · {verdict.layer} · {verdict.subject.label} · {verdict.confidence} confidence"

    @property
    def outcome(self) -> str:
        """``ok``, ``MISS`` or ``left out``."""
        if self.diagnosis is None:
            return "left out"
        return "MISS" if self.misses else "ok"


def run(fault: Fault, say: Say, shape: Shape | None = None, window_s: float = WINDOW_S) -> Run:
    """One fault, live.

    Args:
        fault: to put in place.
        say: told in a few words what is going on.
        shape: another server than the fault's own.
        window_s: how long `diagnose` watches.

    Raises:
        LabError: the server did not start, or the fault did not take effect.
    """
    lacking = fault.lacking()
    if lacking:
        return Run(fault=fault, skipped=lacking)
    began = time.monotonic()
    say(f"{fault.name}: starting a server")
    with Lab(shape or fault.start()) as lab:
        if fault.ready:
            lab.wait_ready()
        say(f"{fault.name}: {fault.does}")
        inject(lab, fault)
        say(f"{fault.name}: diagnosing")
        found = diagnosed(lab, window_s)
    say("")
    return Run(fault=fault, diagnosis=found, wall_s=round(time.monotonic() - began, 1))


def diagnosed(lab: Lab, window_s: float = WINDOW_S) -> Diagnosis:
    """What `vllmdiag diagnose` says of a lab; where nothing of it lives, of the machine."""
    alive = {pid: p.title for pid, p in lab.processes().items() if p.state != "Z" and (p.title or pid == lab.root)}
    # A resource tracker outlives its server for a moment, and belongs to nobody then.
    titled = [pid for pid, title in alive.items() if title.startswith("VLLM::")]
    target = lab.root if lab.root in alive else min(titled or alive, default=None)
    return diagnose(collect(target, None, window_s))


def verify(chosen: Iterable[Fault], times: int, say: Say, show: Callable[[Run], None]) -> bool:
    """Run faults one after the other, some times over.

    Args:
        chosen: the faults.
        times: rounds.
        say: told what is going on.
        show: given each result.

    Returns:
        Whether no diagnosis was wrong.
    """
    right = True
    for _ in range(times):
        for fault in chosen:
            result = run(fault, say)
            show(result)
            right = right and not result.misses
    return right

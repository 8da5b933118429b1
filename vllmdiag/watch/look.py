"""A close look beside the sampling: one at a time, its cost counted."""

from __future__ import annotations

from typing import NamedTuple

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.errors import VllmdiagError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.aside import Aside
from vllmdiag.sources.collect import collect

from .budget import Budget, cpu_s
from .trigger import Reason


class Looked(NamedTuple):
    """What came of a look."""

    reason: Reason | None
    """None: only to see anew what changes slowly."""
    snapshot: Snapshot
    diagnosis: Diagnosis


def look(pid: int, window_s: float, reason: Reason | None = None) -> Looked:
    """Watch closely and judge. Raises TargetError where the server has gone."""
    snapshot = collect(pid, None, window_s, "diagnose")
    return Looked(reason, snapshot, diagnose(snapshot))


class Looks:
    """Looks in the background.

    Args:
        budget: of CPU; what is not urgent waits until it allows.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._aside: Aside | None = None
        self._result: list[Looked | VllmdiagError] = []

    def start(self, pid: int, window_s: float, reason: Reason | None, *, urgent: bool) -> bool:
        """Begin a look at the server that has this pid; False where one is under way or must wait."""
        if self._aside is not None or not (urgent or self._budget.allows()):
            return False

        def work() -> None:
            before = cpu_s()
            try:
                self._result.append(look(pid, window_s, reason))
            except VllmdiagError as error:
                self._result.append(error)
            self._budget.spend(cpu_s() - before)

        self._result.clear()
        self._aside = Aside(work)
        return True

    def result(self) -> Looked | VllmdiagError | None:
        """What the look gave, once; None while it is under way, or where there was none."""
        if self._aside is None or not (self._result or self._aside.done):
            return None
        aside, self._aside = self._aside, None
        aside.join()  # raises what was no error of ours: a bug
        return self._result.pop()

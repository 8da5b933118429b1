"""One check from the look to the result: a second look where the first is not proof, and waiting until all is well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from vllmdiag.diagnosis.expectations import compare
from vllmdiag.diagnosis.profiles import Rule, hopeless, judge, needs_second_look
from vllmdiag.model.check import CheckResult
from vllmdiag.model.errors import TargetError, TimedOutError, VllmdiagError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.collect import collect

_AGAIN_FACTOR = 2.0
"""The second window is so much longer than the first."""
_RETRY_S = 0.5


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how patiently."""

    rule: Rule
    wanted: tuple[tuple[str, str], ...] = ()
    """Expectations, from `vllmdiag.diagnosis.expectations.parse`."""
    window_s: float = 1.0
    timeout_s: float | None = None
    """For everything together."""
    wait_s: float = 0.0
    """How long to go on until all is well."""


Look = Callable[[float], Snapshot]
"""Watches for so many seconds. Raises TargetError where there is nothing to watch."""


def on_this_machine(
    target: int | None,
    port: int | None,
    say: Callable[[str], None],
    asked: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Look:
    """Look at an instance of this machine.

    Args:
        target: any pid of it; None for the only one.
        port: its HTTP port, instead of a pid.
        say: told in a few words what is going on.
        asked: when the user asked, on `time.monotonic`: a part of the first window may have passed since.
        meanwhile: called once in every window, when there is nothing to do but to wait.
    """
    since = [asked]

    def look(window_s: float) -> Snapshot:
        return collect(
            target, port, window_s, "diagnose", say, asked=since.pop() if since else None, meanwhile=meanwhile
        )

    return look


def check(question: Question, look: Look) -> CheckResult:
    """Answer a question within its time.

    Raises:
        TimedOutError: the time is over.
        VllmdiagError: what `look` raises.
    """
    if question.timeout_s is None:
        return _patiently(question, look)
    answer: list[CheckResult | BaseException] = []

    def work() -> None:
        try:
            answer.append(_patiently(question, look))
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            answer.append(error)

    # A daemon: a look that hangs in the kernel must not keep the probe from ending.
    thread = threading.Thread(target=work, name="check", daemon=True)
    thread.start()
    thread.join(question.timeout_s)
    if not answer:
        raise TimedOutError(
            f"no answer within {question.timeout_s:g} s", why="the look takes longer", next="--timeout SECONDS"
        )
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]


def _patiently(question: Question, look: Look) -> CheckResult:
    end = time.monotonic() + question.wait_s
    while True:
        result: CheckResult | VllmdiagError
        try:
            result = _once(question, look)
            if result.exit_code == 0 or hopeless(result):
                return result
        except TargetError as error:  # not started yet, or restarting
            result = error
        if time.monotonic() >= end:
            if isinstance(result, VllmdiagError):
                raise result
            return result
        time.sleep(min(_RETRY_S, max(0.0, end - time.monotonic())))


def _once(question: Question, look: Look) -> CheckResult:
    first = _judged(question, look(question.window_s))
    if not needs_second_look(first):
        return first
    return _judged(question, look(question.window_s * _AGAIN_FACTOR), first)


def _judged(question: Question, snapshot: Snapshot, before: CheckResult | None = None) -> CheckResult:
    # Here, not above: where the caller has loaded them while the window passed, a probe waits for nothing.
    from vllmdiag.diagnosis.judge import diagnose
    from vllmdiag.diagnosis.measures import measures_of
    from vllmdiag.diagnosis.view import view

    diagnosis, seen = diagnose(snapshot), view(snapshot)
    return judge(
        diagnosis,
        question.rule,
        expectations=compare(question.wanted, seen, diagnosis),
        measures=measures_of(diagnosis, seen),
        before=before,
    )

"""What counts for whom: the probe that restarts, the one that routes, the pipeline, the person."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.unit.diagnosis import startup_cases
from tests.unit.diagnosis import test_causes as causes
from tests.unit.diagnosis.scenario import ENGINE, WORKER0, Server
from vllmdiag.catalogue.entries import catalogue
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.diagnosis.profiles import Rule, baseline_of, judge
from vllmdiag.model.base import Missing
from vllmdiag.model.check import Profile
from vllmdiag.model.errors import TargetError, TimedOutError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.watch.checks import Question, check

Scenario = Callable[[Server], None]
PROFILES: tuple[Profile, ...] = ("liveness", "readiness", "ci", "full")


def seen(change: Scenario | None = None, tp: int = 2) -> Snapshot:
    server = Server(tp=tp)
    if change is not None:
        change(server)
    return server.snapshot()


def blind(server: Server) -> None:
    hole = Missing(what="stacks", why="EACCES", next="run as root")
    server.stacks = dict.fromkeys((100, ENGINE, *server.workers), hole)
    server.polled = False


def codes(change: Scenario | None = None, **rule: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for profile in PROFILES:
        question = Question(rule=Rule(profile=profile, **rule))  # type: ignore[arg-type]
        found[profile] = check(question, lambda _window_s: seen(change)).exit_code
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, {"liveness": 0, "readiness": 0, "ci": 0, "full": 0}),
        (startup_cases.loads_slowly, {"liveness": 0, "readiness": 1, "ci": 1, "full": 0}),
        (causes.start_waits, {"liveness": 0, "readiness": 2, "ci": 2, "full": 2}),
        (causes.worker_stopped, {"liveness": 2, "readiness": 2, "ci": 2, "full": 2}),
        (causes.engine_stopped, {"liveness": 2, "readiness": 2, "ci": 2, "full": 2}),
        (causes.engine_gone, {"liveness": 2, "readiness": 2, "ci": 2, "full": 2}),
        (causes.ring_full, {"liveness": 2, "readiness": 2, "ci": 2, "full": 2}),
        (causes.deaf_client, {"liveness": 0, "readiness": 0, "ci": 1, "full": 1}),
        (causes.remote_kv, {"liveness": 0, "readiness": 2, "ci": 2, "full": 2}),
        (blind, {"liveness": 0, "readiness": 3, "ci": 3, "full": 3}),
    ],
    ids=[
        "idle",
        "starting",
        "start-up stuck",
        "worker stopped",
        "engine stopped",
        "engine dead",
        "ring full",
        "deaf client",
        "remote kv",
        "blind",
    ],
)
def test_each_profile_has_its_own_answer(change: Scenario | None, expected: dict[str, int]) -> None:
    assert codes(change) == expected


def test_liveness_says_unknown_and_does_not_fail_for_it() -> None:
    result = check(Question(rule=Rule(profile="liveness")), lambda _window_s: seen(blind))
    assert (result.status, result.exit_code) == ("unknown", 0)


def test_no_cause_that_a_restart_cannot_change_is_a_reason_to_restart() -> None:
    base = diagnose(seen(causes.worker_stopped))
    finding = base.findings[0]
    for cause in catalogue().values():
        if cause.severity != "critical":
            continue
        renamed = msgspec.structs.replace(finding, cause=cause.slug, layer=cause.layer)
        result = judge(msgspec.structs.replace(base, findings=(renamed,)), Rule(profile="liveness"))
        if cause.layer == 2 and cause.slug not in ("endpoint-gone", "zmq-io-silent"):
            assert result.exit_code == 0, f"{cause.slug} is of a start-up"
        assert bool(result.exit_code) != bool(result.set_aside), cause.slug


def test_a_finding_of_low_confidence_restarts_nothing() -> None:
    base = diagnose(seen(causes.ring_full))
    doubtful = tuple(msgspec.structs.replace(f, confidence="low") for f in base.findings)
    result = judge(msgspec.structs.replace(base, findings=doubtful), Rule(profile="liveness"))
    assert result.exit_code == 0
    assert result.set_aside[0].why == "not proven"


@pytest.mark.parametrize(("fail_on", "code"), [("warning", 1), ("unknown", 0), ("critical", 0)])
def test_fail_on_says_from_where_it_fails_and_the_status_stays(fail_on: str, code: int) -> None:
    rule = Rule(profile="full", fail_on=fail_on)  # type: ignore[arg-type]
    result = judge(diagnose(seen(causes.deaf_client)), rule)
    assert (result.status, result.exit_code) == ("warning", code)


@pytest.mark.parametrize(
    ("ignored", "code"),
    [
        (("process-stopped", ""), 0),
        (("process-stopped", "Worker_TP1"), 0),
        (("process-stopped", str(WORKER0 + 1)), 0),
        (("process-stopped", "Worker_TP0"), 2),
        (("worker-dead", ""), 2),
    ],
)
def test_an_ignored_cause_does_not_count_nor_what_it_explains(ignored: tuple[str, str], code: int) -> None:
    result = judge(diagnose(seen(causes.worker_stopped)), Rule(ignored=(ignored,)))
    assert result.exit_code == code
    assert [s.why for s in result.set_aside] == (["ignored"] if code == 0 else [])


def test_what_stands_in_the_baseline_is_no_news_and_all_else_is() -> None:
    baseline = baseline_of(diagnose(seen(causes.deaf_client)))
    assert [k.cause for k in baseline.known] == ["client-not-reading"]
    known = Rule(profile="ci", baseline=baseline)
    assert judge(diagnose(seen(causes.deaf_client)), known).exit_code == 0
    assert judge(diagnose(seen(causes.worker_stopped)), known).exit_code == 2


def _looks(*changes: Scenario | None) -> tuple[Callable[[float], Snapshot], list[float]]:
    coming: Iterator[Scenario | None] = iter(changes)
    windows: list[float] = []

    def look(window_s: float) -> Snapshot:
        windows.append(window_s)
        return seen(next(coming))

    return look, windows


def test_what_is_inferred_must_show_in_a_second_longer_window() -> None:
    look, windows = _looks(causes.ring_full, None)
    result = check(Question(rule=Rule(profile="liveness"), window_s=0.5), look)
    assert (result.exit_code, result.looks, windows) == (0, 2, [0.5, 1.0])
    look, _ = _looks(causes.ring_full, causes.ring_full)
    assert check(Question(rule=Rule(profile="liveness")), look).exit_code == 2


def test_two_looks_that_blame_different_things_prove_neither() -> None:
    look, _ = _looks(causes.ring_full, causes.reply_left)
    result = check(Question(rule=Rule(profile="liveness")), look)
    assert result.exit_code == 0
    assert "seen in one look of two" in [s.why for s in result.set_aside]


def test_what_the_kernel_says_needs_no_second_look() -> None:
    look, windows = _looks(causes.engine_gone)
    result = check(Question(rule=Rule(profile="liveness")), look)
    assert (result.exit_code, len(windows)) == (2, 1)


def test_waiting_ends_when_all_is_well() -> None:
    look, windows = _looks(startup_cases.loads_slowly, causes.start_waits, startup_cases.loads_slowly, None)
    result = check(Question(rule=Rule(profile="ci"), wait_s=60), look)
    assert (result.exit_code, len(windows)) == (0, 4)


def test_waiting_ends_at_once_where_a_member_has_died() -> None:
    look, windows = _looks(startup_cases.loads_slowly, causes.engine_gone)
    assert check(Question(rule=Rule(profile="readiness"), wait_s=60), look).exit_code == 2
    assert len(windows) == 2


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    tries = []

    def look(_window_s: float) -> Snapshot:
        tries.append(1)
        if len(tries) < 3:
            raise TargetError("no vLLM process is running here")
        return seen()

    assert check(Question(rule=Rule(), wait_s=60), look).exit_code == 0


def test_a_server_that_never_comes_is_no_target() -> None:
    def look(_window_s: float) -> Snapshot:
        raise TargetError("no vLLM process is running here")

    with pytest.raises(TargetError):
        check(Question(rule=Rule(), wait_s=0.6), look)


def test_an_answer_that_takes_too_long_is_out_of_time() -> None:
    never = threading.Event()

    def look(_window_s: float) -> Snapshot:
        never.wait()
        return seen()

    with pytest.raises(TimedOutError):
        check(Question(rule=Rule(), timeout_s=0.2), look)
    never.set()


def test_the_error_of_a_look_with_a_deadline_is_not_lost() -> None:
    def look(_window_s: float) -> Snapshot:
        raise TargetError("no such process")

    with pytest.raises(TargetError, match="no such process"):
        check(Question(rule=Rule(), timeout_s=5), look)


def test_the_summary_names_the_fault_and_what_was_set_aside() -> None:
    result = check(
        Question(rule=Rule(profile="ci", ignored=(("client-not-reading", ""),))), lambda _w: seen(causes.deaf_client)
    )
    assert "client-not-reading (ignored)" in result.summary
    stopped = check(Question(rule=Rule(profile="liveness")), lambda _window_s: seen(causes.worker_stopped))
    assert stopped.summary.startswith("process-stopped: ")

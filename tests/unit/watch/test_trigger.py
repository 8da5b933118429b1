"""When to look and when to capture, on rounds made by hand."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.diagnosis import test_causes as causes
from tests.unit.diagnosis.scenario import ENGINE, WORKER0, Server
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.snapshot import LogLine, Snapshot
from vllmdiag.watch.trigger import Reason, Signs, Trigger, signs_of

LONG_WAIT = "INFO [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds."
STALL_S = 5.0


def round_of(server: Server, *lines: str) -> Snapshot:
    log = tuple(LogLine(file="log", number=0, text=line) for line in lines)
    return msgspec.structs.replace(server.snapshot(), log_lines=log)


def moving() -> Server:
    server = Server()
    server.broadcast = [server.ring({slot: (0, 1)}) for slot in range(8)]
    return server


def judged(change: object = None) -> Diagnosis:
    server = Server()
    if change is not None:
        change(server)  # type: ignore[operator]
    return diagnose(server.snapshot())


FAULT, FINE = judged(causes.worker_stopped), judged()


def still(t: float, **more: object) -> Signs:
    return msgspec.structs.replace(Signs(t=t, moved={1: False}), **more)


def test_a_ring_that_moves_is_motion_of_its_engine() -> None:
    assert signs_of(moving().snapshot(), 1.0).moved == {ENGINE: True}
    assert signs_of(Server().snapshot(), 1.0).moved == {ENGINE: False}


def test_unread_slots_and_stopped_processes_wait_and_idle_ones_do_not() -> None:
    server = Server()
    assert signs_of(server.snapshot(), 1.0).waiting == ()
    causes.worker_stopped(server)
    waiting = signs_of(server.snapshot(), 1.0).waiting
    assert any("have not read" in words for words in waiting)
    assert "Worker_TP1 is stopped" in waiting


def test_a_member_that_ends_within_the_round_is_gone_and_one_gone_before_is_no_news() -> None:
    server = Server(states={WORKER0: ("S", "S", "Z")})
    assert signs_of(server.snapshot(), 1.0).gone == (WORKER0,)
    server.states = {WORKER0: "Z"}
    assert signs_of(server.snapshot(), 1.0).gone == ()


def test_the_long_wait_line_is_a_sign_and_other_lines_are_none() -> None:
    assert signs_of(round_of(Server(), LONG_WAIT), 1.0).long_wait
    assert not signs_of(round_of(Server(), "INFO Application startup complete."), 1.0).long_wait


def test_without_any_process_nothing_moves() -> None:
    assert signs_of(Snapshot(), 1.0).moved == {0: False}


def test_nothing_is_asked_for_while_all_moves() -> None:
    trigger = Trigger(STALL_S)
    assert [trigger.feed(Signs(t=float(t), moved={1: True})) for t in range(100)] == [None] * 100


def test_one_engine_that_stands_beside_one_that_moves_is_seen() -> None:
    trigger = Trigger(STALL_S)
    reasons = [trigger.feed(Signs(t=float(t), moved={1: True, 2: False})) for t in range(8)]
    assert reasons[:5] == [None] * 5
    assert reasons[6] == "still"


@pytest.mark.parametrize(("waiting", "reason"), [((), "still"), (("1 reader has not read",), "stall")])
def test_quiet_is_looked_at_after_the_stall_time_and_urgently_where_something_waits(
    waiting: tuple[str, ...], reason: Reason
) -> None:
    trigger = Trigger(STALL_S)
    reasons = [trigger.feed(still(float(t), waiting=waiting)) for t in range(8)]
    assert reasons == [None] * 5 + [reason] * 3


def test_a_death_and_a_long_wait_are_looked_at_at_once_and_the_line_that_repeats_is_one() -> None:
    trigger = Trigger(STALL_S)
    assert trigger.feed(still(0.0, gone=(7,))) == "died"
    assert [trigger.feed(still(t, long_wait=True)) for t in (1.0, 2.0)] == ["long-wait", None]
    trigger.feed(Signs(t=3.0, moved={1: True}))
    assert trigger.feed(still(4.0, long_wait=True)) == "long-wait"


def test_a_quiet_that_the_look_calls_idle_is_no_incident() -> None:
    trigger = Trigger(STALL_S)
    assert trigger.judged("still", FINE) == (False, False)
    assert trigger.incident is None


def test_an_incident_is_captured_once_and_a_healthy_look_ends_it() -> None:
    trigger = Trigger(STALL_S)
    assert trigger.judged("stall", FAULT) == (True, False)
    assert trigger.judged("still", FAULT) == (False, False)
    assert trigger.judged("still", FINE) == (False, True)
    assert trigger.judged("stall", FAULT) == (True, False)


def test_motion_of_every_engine_ends_it_too_and_motion_of_one_does_not() -> None:
    trigger = Trigger(STALL_S)
    trigger.judged("stall", FAULT)
    assert not trigger.recovered(Signs(t=1.0, moved={1: True, 2: False}))
    assert not trigger.recovered(Signs(t=1.0, moved={1: True}, waiting=("a slot",)))
    assert trigger.recovered(Signs(t=2.0, moved={1: True, 2: True}))
    assert not trigger.recovered(Signs(t=3.0, moved={1: True, 2: True}))


def test_a_death_within_a_stall_is_captured_for_itself_and_what_follows_it_is_not() -> None:
    trigger = Trigger(STALL_S)
    trigger.judged("stall", FAULT)
    assert trigger.judged("died", judged(causes.engine_gone)) == (True, False)
    assert trigger.judged("died", judged(causes.engine_gone)) == (False, False)


@given(st.lists(st.sampled_from(["still", "stall", "healthy", "died", "moves"]), max_size=60))
def test_between_two_captures_for_one_reason_lies_a_recovery(steps: list[str]) -> None:
    trigger = Trigger(STALL_S)
    told: list[str] = []
    for step in steps:
        if step == "moves":
            told += ["recovered"] if trigger.recovered(Signs(t=0.0, moved={1: True})) else []
            continue
        reason: Reason = "died" if step == "died" else "stall"
        new, recovered = trigger.judged(reason, FINE if step == "healthy" else FAULT)
        told += [reason] if new else ["recovered"] if recovered else []
    for reason in ("stall", "died"):
        relevant = [one for one in told if one in (reason, "recovered")]
        assert (reason, reason) not in pairwise(relevant)

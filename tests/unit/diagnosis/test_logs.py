"""What logs add to a verdict, and when they are left out of it."""

from __future__ import annotations

import pytest

from vllmdiag.diagnosis.judge import diagnose

from . import log_cases
from .log_cases import FATAL, log, only_log, stalled
from .scenario import Server

WAIT = (
    "(EngineCore pid=200) INFO 05-23 11:00:00 [shm_broadcast.py:{line}] No available shared memory broadcast block"
    " found in 60 seconds.\n"
)


@pytest.mark.parametrize(
    ("line", "side"), [(871, "waits for the answer of a worker"), (750, "waits for a reader of its ring")]
)
def test_a_stall_is_told_with_the_side_of_the_ring_that_waits(line: int, side: str) -> None:
    server = Server()
    stalled(server)
    log(server, WAIT.format(line=line))
    found = diagnose(server.snapshot()).verdict
    assert found.status == "critical"
    assert any(side in words for words in found.evidence)


def test_a_death_is_told_with_the_first_error_of_the_log() -> None:
    server = Server()
    stalled(server)
    server.states[log_cases.W1] = "Z"
    log(server, FATAL.format(error="ValueError: the reason"))
    found = diagnose(server.snapshot()).verdict
    assert found.cause == "worker-dead"
    assert any("the reason" in words and "vllm.log:2" in words for words in found.evidence)


def test_an_error_of_the_past_is_not_held_against_a_server_that_serves() -> None:
    server = Server()
    log(server, FATAL.format(error="ValueError: once"))
    assert diagnose(server.snapshot()).verdict.cause == "idle"


def test_an_unknown_error_is_told_and_the_engine_that_raised_it_is_gone() -> None:
    server = Server()
    only_log(server, FATAL.format(error="ValueError: nobody has seen this before"))
    found = diagnose(server.snapshot()).verdict
    assert (found.cause, found.subject.label) == ("engine-dead", "EngineCore")
    assert "nobody has seen this before" in found.summary


def test_an_echo_says_where_to_look_and_is_no_verdict_about_anybody() -> None:
    server = Server()
    log_cases.only_echoes(server)
    found = diagnose(server.snapshot()).verdict
    assert (found.status, found.cause, found.confidence) == ("unknown", "echo-only", "low")
    assert "look for" in found.summary

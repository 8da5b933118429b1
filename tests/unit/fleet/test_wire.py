"""An answer is understood however it is cut into pieces; what is none is called garbage, never half believed."""

from __future__ import annotations

import gzip

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.bundle.pack import pack
from vllmdiag.fleet import wire
from vllmdiag.fleet.wire import End, Hello, Line, Seen, encode
from vllmdiag.model.fleet import NodeReport

from .nodes import state

IDLE = state("idle")


def said(*lines: Line | bytes) -> bytes:
    return b"".join(line if isinstance(line, bytes) else encode(line) for line in lines)


def report(data: bytes, size: int = 1 << 16) -> NodeReport:
    answer = wire.Answer("n1", asked=100.0)
    for at in range(0, len(data), size):
        if not answer.feed(data[at : at + size], 101.0):
            break
    return answer.report(2.0)


@given(st.integers(16, 5000))
def test_an_answer_is_the_same_in_pieces_of_any_size(size: int) -> None:
    whole = said(Hello(tool="1", clock=100.5, instances=1), Seen(pid=7, snapshot=IDLE), End())
    found = report(whole, size)
    assert (found.outcome, found.snapshots, found.tool) == ("answered", (IDLE,), "1")
    assert (found.skew_s, found.skew_within_s) == (0.0, 0.5)


def test_what_a_shell_prints_before_is_passed_over() -> None:
    assert report(said(b"Welcome to n1\n\n", Hello(instances=0), End())).outcome == "empty"


def test_a_node_without_vllm_says_so() -> None:
    assert report(said(Hello(instances=0), End())).outcome == "empty"


def test_an_answer_that_was_cut_off_is_not_a_healthy_one() -> None:
    assert report(said(Hello(instances=0))).outcome == "garbage"
    assert report(b"").outcome == "garbage"
    half = report(said(Hello(instances=2), Seen(pid=7, snapshot=IDLE)))
    assert half.outcome == "answered"
    assert "1 of 2 instances are missing" in half.problem


def test_an_instance_that_could_not_be_looked_at_is_named() -> None:
    found = report(said(Hello(instances=1), Seen(pid=7, problem="not permitted"), End()))
    assert found.outcome == "refused"
    assert "pid 7: not permitted" in found.problem


def test_an_answer_of_a_later_version_with_more_fields_is_understood() -> None:
    line = msgspec.json.decode(encode(Hello(tool="9", instances=0)))
    later = msgspec.json.encode({**line, "schema": "vllmdiag.node/1.4", "more": [1, 2]}) + b"\n"
    assert report(said(later, End())).outcome == "empty"


def test_another_major_version_is_refused_by_name() -> None:
    found = report(said(Hello(schema="vllmdiag.node/2", tool="9"), End()))
    assert found.outcome == "garbage"
    assert "vllmdiag.node/2 (vllmdiag 9)" in found.problem


@given(st.binary(max_size=400))
def test_whatever_else_comes_is_garbage_and_raises_nothing(data: bytes) -> None:
    assert report(data, 7).outcome == "garbage"


@given(st.binary(min_size=1, max_size=60).filter(lambda b: b.strip() != b"" and b"\n" not in b))
def test_what_is_no_line_after_the_greeting_makes_it_garbage(junk: bytes) -> None:
    assert report(said(Hello(instances=1), junk + b"\n", End())).outcome == "garbage"


def test_a_node_that_never_stops_talking_is_not_listened_to() -> None:
    answer = wire.Answer("n1", 0.0)
    assert not answer.feed(b"x" * (wire.MAX_BYTES + 1), 0.0)
    assert answer.report(1.0).outcome == "garbage"
    babble = wire.Answer("n1", 0.0)
    assert not all(babble.feed(b"no answer\n" * 1000, 0.0) for _ in range(20))


def test_a_bundle_of_capture_is_an_answer_too() -> None:
    found = report(pack([IDLE]), 1000)
    assert (found.outcome, found.snapshots[0].target_pids) == ("answered", IDLE.target_pids)


def test_a_bundle_that_was_cut_off_is_garbage() -> None:
    assert report(pack([IDLE])[:-400]).outcome == "garbage"
    assert report(gzip.compress(b"something else")).outcome == "garbage"

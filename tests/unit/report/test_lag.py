"""Lag over time: every peak is seen, equal readers are one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.pages import recorded
from vllmdiag.model.report import LagTrace
from vllmdiag.render.html_lag import lag_chart, peaks

_lags = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=400)


@given(_lags, st.integers(1, 50))
def test_a_peak_is_never_lost_and_time_never_runs_back(lags: list[tuple[int, int]], most: int) -> None:
    points = [(0.5 * i, pair) for i, pair in enumerate(lags)]
    drawn = peaks(points, 0.5 * len(points), most)
    assert len(drawn) <= max(most, 1) or drawn == points
    for reader in (0, 1):
        assert max(pair[reader] for _, pair in drawn) == max(pair[reader] for pair in lags)
    times = [t for t, _ in drawn]
    assert times == sorted(times)


@given(_lags)
def test_the_last_part_tells_how_it_ended(lags: list[tuple[int, int]]) -> None:
    points = [(float(i), pair) for i, pair in enumerate(lags)]
    assert all(drawn >= last for drawn, last in zip(peaks(points, float(len(points)), 7)[-1][1], lags[-1], strict=True))


def test_who_lags_at_the_end_comes_before_who_lagged_more_and_caught_up() -> None:
    points = ((0.0, (9, 1)), (1.0, (0, 1)))
    chart = lag_chart(LagTrace(segment="s", readers=("a", "b"), slots=10, points=points, end_s=2.0), 600.0)
    assert [(line.name, line.most, line.now) for line in chart.lines] == [("b", 1, 1), ("a", 9, 0)]


def test_equal_readers_are_one_line_and_the_one_that_lags_most_comes_first() -> None:
    readers = tuple(f"Worker_TP{k}" for k in range(384))
    lag = tuple(9 if k == 5 else 0 for k in range(384))
    chart = lag_chart(LagTrace(segment="s", readers=readers, slots=10, points=((0.0, lag),), end_s=3.0), 600.0)
    assert [(line.name, line.most, line.now) for line in chart.lines] == [
        ("Worker_TP5", 9, 9),
        ("Worker_TP0-4,6-383", 0, 0),
    ]


def test_more_lines_than_can_be_told_apart_are_said_in_words() -> None:
    readers = tuple(f"reader {k}" for k in range(9))
    chart = lag_chart(
        LagTrace(segment="s", readers=readers, slots=10, points=((0.0, tuple(range(9))),), end_s=1.0), 600.0
    )
    assert len(chart.lines) == 6
    assert chart.rest == "3 other readers: never more than 2 unread"


def test_a_recording_is_reduced_to_the_moments_at_which_a_lag_changed() -> None:
    (trace,) = recorded().traces
    assert trace.readers == ("Worker_TP0", "Worker_TP1")
    assert trace.points[0] == (0.0, (0, 0))
    assert [t for t, _ in trace.points[1:]] == [float(t) for t in range(21, 31)]
    assert trace.points[-1][1] == (0, 10)
    assert (trace.start_s, trace.end_s) == (0.0, 60.0)

"""Reports of NCCL RAS: whatever the bytes, a report or a ValueError; and counts that move are no finding."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from vllmdiag.diagnosis.collectives import lagging, spreads
from vllmdiag.model.gpu import RasReport
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.ras_reports import from_json, from_text

SAMPLES = Path(__file__).parents[1] / "unit" / "gpu" / "ras"
TEXTS = [path.read_text() for path in sorted(SAMPLES.glob("*.txt"))]
JSONS = [path.read_bytes() for path in sorted(SAMPLES.glob("*.json"))]
HEALTHY = (SAMPLES / "healthy_tp8.json").read_bytes()


@given(st.text() | st.sampled_from(TEXTS).flatmap(lambda text: st.integers(0, len(text)).map(lambda n: text[:n])))
def test_any_text_ends_in_a_report_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        from_text(text)


@given(st.sampled_from(TEXTS), st.data())
def test_a_text_with_lines_lost_doubled_or_garbled_is_still_read(text: str, data: st.DataObject) -> None:
    lines = text.splitlines()
    at = data.draw(st.integers(1, len(lines) - 1))
    lines[at : at + 1] = data.draw(st.lists(st.sampled_from(lines) | st.text(max_size=80), max_size=3))
    assert from_text("\n".join(lines)).nccl_version == "2.30.7"


@given(st.binary() | st.sampled_from(JSONS).flatmap(lambda body: st.integers(0, len(body)).map(lambda n: body[:n])))
def test_any_bytes_end_in_a_report_or_a_value_error(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        from_json(body)


def report(counts: list[int], t: float) -> RasReport:
    document = json.loads(HEALTHY)
    for rank, count in zip(document["communicators"][0]["ranks"], counts, strict=True):
        rank["collective_counts"]["AllReduce"] = count
    read = from_json(json.dumps(document).encode())
    return RasReport(**{**{name: getattr(read, name) for name in read.__struct_fields__}, "t": t})


COUNTS = st.lists(st.integers(0, 10_000), min_size=8, max_size=8)


@given(COUNTS, st.lists(st.integers(1, 100), min_size=8, max_size=8))
def test_ranks_that_all_move_are_no_finding_however_far_apart(first: list[int], steps: list[int]) -> None:
    last = [count + step for count, step in zip(first, steps, strict=True)]
    assert lagging(Snapshot(ras=(report(first, 0.0), report(last, 3.0)))) == ()


@given(st.integers(0, 10_000))
def test_ranks_at_one_count_are_no_finding_even_where_it_stands_still(count: int) -> None:
    assert spreads(Snapshot(ras=(report([count] * 8, 0.0), report([count] * 8, 3.0)))) == ()


@given(st.integers(1, 10_000), st.integers(1, 50), st.integers(0, 7))
def test_the_one_rank_that_is_behind_and_still_is_named(high: int, by: int, rank: int) -> None:
    assume(by <= high)
    counts = [high - by if r == rank else high for r in range(8)]
    (lag,) = lagging(Snapshot(ras=(report(counts, 0.0), report(counts, 3.0))))
    assert ([r.rank for r in lag.ranks], lag.relation, lag.low, lag.high) == ([rank], "behind", high - by, high)
    assert lag.moving is False


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_the_one_rank_that_is_ahead_is_named(low: int, rank: int) -> None:
    counts = [low + 1 if r == rank else low for r in range(8)]
    (lag,) = lagging(Snapshot(ras=(report(counts, 0.0), report(counts, 3.0))))
    assert ([r.rank for r in lag.ranks], lag.relation) == ([rank], "ahead")

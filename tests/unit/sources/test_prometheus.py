"""The page of /metrics: what is kept, how it is summed, and that no page can make the reader crash."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.sources.prometheus import parse_metrics
from vllmdiag.vllm.metrics import METRICS


def parse(*lines: str) -> dict[str, dict[str, float]]:
    return parse_metrics("\n".join(lines).encode())


def test_values_are_kept_by_engine_and_summed_over_all_other_labels() -> None:
    assert parse(
        'vllm:generation_tokens_total{engine="0",model_name="a"} 10.0',
        'vllm:generation_tokens_total{engine="0",model_name="b"} 2.5e1',
        'vllm:generation_tokens_total{engine="1",model_name="a"} 7 1700000000000',
        "vllm:prompt_tokens_total 3",
    ) == {"generation_tokens_total": {"0": 35.0, "1": 7.0}, "prompt_tokens_total": {"": 3.0}}


def test_requests_that_wait_are_told_apart_by_reason() -> None:
    assert parse(
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2',
    ) == {
        "num_requests_waiting_by_reason": {"0": 5.0},
        "num_requests_waiting_by_reason:capacity": {"0": 3.0},
        "num_requests_waiting_by_reason:deferred": {"0": 2.0},
    }


def test_the_old_name_of_the_cache_usage_counts_only_where_the_new_one_is_absent() -> None:
    assert parse('vllm:gpu_cache_usage_perc{engine="0"} 0.5') == {"kv_cache_usage_perc": {"0": 0.5}}
    both = ('vllm:gpu_cache_usage_perc{engine="0"} 0.5', 'vllm:kv_cache_usage_perc{engine="0"} 0.5')
    assert parse(*both) == parse(*reversed(both)) == {"kv_cache_usage_perc": {"0": 0.5}}


@pytest.mark.parametrize(
    "line",
    [
        "# TYPE vllm:num_requests_running gauge",
        "python_gc_objects_collected_total 5",
        'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 5',
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} +Inf',
        'vllm:num_requests_running{engine="0"} many',
        'vllm:num_requests_running{engine="0} 5',
        'vllm:num_requests_running{engine="0"}',
        "vllm:num_requests_running",
        'other:num_requests_running{engine="0"} 5',
        "",
    ],
)
def test_everything_else_is_left_out(line: str) -> None:
    assert parse(line, "vllm:num_requests_waiting 1") == {"num_requests_waiting": {"": 1.0}}


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


LABEL = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
SERIES = st.dictionaries(st.tuples(st.sampled_from(METRICS.kept), LABEL, LABEL), FINITE, max_size=8)


@given(SERIES)
def test_what_is_written_is_read_whatever_stands_in_the_labels(series: dict[tuple[str, str, str], float]) -> None:
    page = "".join(
        f'vllm:{name}{{engine="{escape(engine)}",model_name="{escape(model)}"}} {value!r}\n'
        for (name, engine, model), value in series.items()
    )
    expected: dict[str, dict[str, float]] = {}
    for (name, engine, _), value in series.items():
        engines = expected.setdefault(name, {})
        engines[engine] = engines.get(engine, 0.0) + value
    assert parse_metrics(page.encode()) == expected


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_no_page_crashes_the_reader_and_every_value_is_finite(tails: list[bytes]) -> None:
    page = b"\n".join(b"vllm:num_requests_running" + tail for tail in tails)
    values = parse_metrics(page)
    assert set(values) <= {"num_requests_running"}
    assert all(math.isfinite(value) for series in values.values() for value in series.values())


def test_a_line_of_a_million_quotes_is_read_in_one_pass() -> None:
    assert parse("vllm:num_requests_running{" + '"' * 1_000_001 + "} 1") == {}

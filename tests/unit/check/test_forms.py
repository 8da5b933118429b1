"""Every form of `check` read back by the library that its readers use, and what no form may let through."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import jsonschema
import msgspec
import pytest
from junitparser import Failure, JUnitXml, Skipped
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text_file

from tests.unit.check import results
from vllmdiag.model.check import CheckResult
from vllmdiag.model.errors import TargetError
from vllmdiag.render.check import check_text
from vllmdiag.render.document import json_schema, to_json
from vllmdiag.render.github import github_text
from vllmdiag.render.junit import junit_text
from vllmdiag.render.nagios import nagios_error, nagios_text
from vllmdiag.render.openmetrics import openmetrics_text
from vllmdiag.render.page import Style

ALL = [results.fault, results.fine, results.set_aside, results.unknown, results.hostile]

# The grammar of the plug-in guidelines: label, value with a unit, four optional thresholds and bounds.
PERFORMANCE = re.compile(r"'([^'=|]+)'=(-?[\d.e+-]+)(s|B|c|%)?;([^;]*);([^;]*);([^;]*)(;[^;]*)?")


@pytest.mark.parametrize("build", ALL)
def test_text_is_one_line_that_begins_with_the_status(build: Callable[[], CheckResult]) -> None:
    text = check_text(build(), Style())
    assert text.count("\n") == 1
    assert text.startswith(build().status.upper())


def test_verbose_text_adds_evidence_next_steps_and_expectations() -> None:
    text = check_text(results.fault(), Style(verbose=1))
    assert "kill -CONT 2863" in text
    assert "✗ workers 4, found 2" in text
    assert "stat of 2863: T" in text


@pytest.mark.parametrize("build", ALL)
def test_json_fits_its_published_schema_and_survives(build: Callable[[], CheckResult]) -> None:
    document = to_json(build())
    jsonschema.Draft202012Validator(json.loads(json_schema("check"))).validate(json.loads(document))
    assert msgspec.json.decode(document, type=CheckResult) == build()


@pytest.mark.parametrize("build", ALL)
def test_junit_is_read_back_by_junitparser_with_the_right_counts(build: Callable[[], CheckResult]) -> None:
    (suite,) = JUnitXml.fromstring(junit_text(build()).encode())
    cases = list(suite)
    broken = [case for case in cases if any(isinstance(one, Failure) for one in case.result)]
    assert suite.tests == len(cases)
    assert suite.failures == len(broken)
    assert bool(broken) == (build().status in ("critical", "warning") and build().exit_code != 0)
    assert suite.errors == (1 if build().exit_code and build().status == "unknown" else 0)


def test_junit_has_a_case_for_each_layer_and_each_expectation() -> None:
    (suite,) = JUnitXml.fromstring(junit_text(results.fault()).encode())
    by_name = {case.name: case.result for case in suite}
    assert set(by_name) == {"1 process", "2 handshake", "3 queue", "4 gpu", "5 client", "workers", "health", "verdict"}
    assert by_name["1 process"][0].type == "process-stopped"
    assert "kill -CONT 2863" in by_name["1 process"][0].text
    assert by_name["workers"][0].message == "expected workers 4, found 2"
    assert by_name["health"] == []


def test_junit_skips_what_is_set_aside_or_could_not_be_seen() -> None:
    (suite,) = JUnitXml.fromstring(junit_text(results.set_aside()).encode())
    assert [type(one) for case in suite for one in case.result] == [Skipped]
    assert suite.skipped == 1


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("read", [read_openmetrics, read_text_file], ids=["openmetrics", "text file"])
def test_metrics_are_read_by_prometheus_clients_own_parsers(
    build: Callable[[], CheckResult], read: Callable[[str], object]
) -> None:
    found = {family.name: family for family in read(openmetrics_text(build()))}  # type: ignore[attr-defined]
    status = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[build().status]
    assert [s.value for s in found["vllmdiag_status"].samples] == [status]
    assert {family.type for family in found.values()} == {"gauge"}
    labels = found["vllmdiag_verdict_info"].samples[0].labels
    assert labels["profile"] == build().profile
    rings = found["vllmdiag_ring_unread_slots"].samples
    assert {s.labels["queue"] for s in rings} >= {"broadcast ring", "response ring"}


def families(result: CheckResult) -> list[Metric]:
    return list(read_openmetrics(openmetrics_text(result)))  # type: ignore[no-untyped-call]


def test_each_finding_is_a_metric_that_says_whether_it_counts() -> None:
    (family,) = (f for f in families(results.set_aside()) if f.name == "vllmdiag_finding")
    assert [s.labels["counts"] for s in family.samples] == ["false"]
    (family,) = (f for f in families(results.fault()) if f.name == "vllmdiag_finding")
    assert [(s.labels["cause"], s.labels["counts"]) for s in family.samples] == [("process-stopped", "true")]


@pytest.mark.parametrize("build", ALL)
def test_nagios_output_keeps_to_the_plug_in_guidelines(build: Callable[[], CheckResult]) -> None:
    first, *more = nagios_text(build()).splitlines()
    text, bar, performance = first.partition(" | ")
    assert text.startswith(f"VLLM {build().status.upper()} - ")
    assert bar
    assert "|" not in text + "".join(more)
    assert all(PERFORMANCE.fullmatch(item) for item in re.split(r" (?=')", performance))
    assert len(re.split(r" (?=')", performance)) == len(build().measures)
    assert len(nagios_text(build())) < 4096


def test_a_nagios_check_that_could_not_be_made_says_so_on_stdout() -> None:
    text = nagios_error(TargetError("no vLLM | runs here", why="none\nseen", next="vllmdiag ps"))
    assert text == "VLLM UNKNOWN - no vLLM / runs here\nwhy: none seen\nnext: vllmdiag ps\n"


@pytest.mark.parametrize("build", ALL)
def test_every_github_annotation_is_one_well_formed_command(build: Callable[[], CheckResult]) -> None:
    for line in github_text(build()).splitlines():
        assert re.fullmatch(r"::(notice|warning|error) title=[^,:]+::.+", line), line


def test_a_fault_is_an_error_annotation_and_a_fine_check_only_a_notice() -> None:
    assert [line.split(" ")[0] for line in github_text(results.fault()).splitlines()] == ["::error"] * 3
    assert [line.split(" ")[0] for line in github_text(results.fine()).splitlines()] == ["::notice"]


@pytest.mark.parametrize(
    "write",
    [github_text, nagios_text, junit_text, lambda r: check_text(r, Style())],
    ids=["github", "nagios", "junit", "text"],
)
def test_no_form_lets_control_characters_of_the_machine_through(write: Callable[[CheckResult], str]) -> None:
    text = write(results.hostile())
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_no_text_of_the_machine_becomes_a_command_of_github() -> None:
    assert "gotcha" in github_text(results.hostile())
    assert not any(line.startswith("::error::gotcha") for line in github_text(results.hostile()).splitlines())
    assert "%250A" in github_text(results.hostile()), "a percent sign of the machine is no escape"

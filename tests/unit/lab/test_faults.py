"""The faults as data: complete, of the catalogue, and made of steps that exist."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from vllmdiag.catalogue.entries import cause
from vllmdiag.lab.faults import Fault, faults, named
from vllmdiag.lab.inject import STEPS
from vllmdiag.model.diagnosis import Diagnosis, Finding, Link, Subject, Verdict
from vllmdiag.model.errors import UsageError

ALL = list(faults().values())


@pytest.mark.parametrize("fault", ALL, ids=lambda f: f.name)
def test_a_fault_expects_a_cause_of_the_catalogue_in_its_layer(fault: Fault) -> None:
    assert cause(fault.cause).layer == fault.layer
    assert fault.healthy == (cause(fault.cause).severity == "ok")


@pytest.mark.parametrize("fault", ALL, ids=lambda f: f.name)
def test_a_fault_is_made_of_steps_with_arguments_they_take_on_a_server_that_can_be_played(fault: Fault) -> None:
    for step in fault.steps:
        function = STEPS[step["do"]]
        inspect.signature(function).bind("lab", **{k: v for k, v in step.items() if k != "do"})
    assert fault.start().problem() == ""
    assert fault.does.endswith(".")


def test_there_is_a_healthy_state_of_each_kind() -> None:
    assert {"idle", "serving", "starting"} <= {fault.cause for fault in ALL if fault.healthy}


def test_an_unknown_fault_is_a_usage_error_that_names_the_others() -> None:
    with pytest.raises(UsageError, match="no fault") as caught:
        named("gremlins")
    assert "worker-stopped" in caught.value.why


def _subject(label: str) -> Subject:
    return Subject(role="Worker", label=label)


EXPECTED = Fault(
    name="x", does="X.", cause="worker-busy", layer=3, subject="Worker_*", chain=("client", "Worker_*"), finding="busy"
)
RIGHT = Diagnosis(
    verdict=Verdict(
        status="critical",
        cause="worker-busy",
        layer=3,
        subject=_subject("Worker_TP1"),
        since_s=None,
        confidence="high",
        summary="",
        chain=(Link(subject=_subject("client"), doing=""), Link(subject=_subject("Worker_TP1"), doing="")),
    ),
    findings=(
        Finding(cause="busy", layer=0, severity="info", confidence="high", subject=_subject("Worker_TP1"), summary=""),
    ),
)


def test_the_expected_diagnosis_misses_nothing() -> None:
    assert EXPECTED.misses(RIGHT) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cause": "worker-dead"}, "cause"),
        ({"layer": 1}, "layer"),
        ({"subject": _subject("EngineCore")}, "subject"),
        ({"chain": ()}, "chain"),
    ],
)
def test_each_difference_is_a_miss_by_its_name(change: dict[str, object], word: str) -> None:
    wrong = msgspec.structs.replace(RIGHT, verdict=msgspec.structs.replace(RIGHT.verdict, **change))
    (miss,) = EXPECTED.misses(wrong)
    assert miss.startswith(word)


def test_a_finding_that_must_be_there_and_is_not_is_a_miss() -> None:
    assert EXPECTED.misses(msgspec.structs.replace(RIGHT, findings=())) == ("no finding busy",)

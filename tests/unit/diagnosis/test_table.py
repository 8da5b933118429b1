"""The table behind the promise: every cause has an entry, a case, a look-alike, and a live fault or why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllmdiag.catalogue.entries import Cause, catalogue
from vllmdiag.diagnosis import case, judge
from vllmdiag.lab.faults import faults
from vllmdiag.vllm import loglines

from .test_causes import FAULTS, LOOK_ALIKES

ROOT = Path(__file__).parents[3]
FINDINGS_ONLY = {"ipc-path-removed"}
"""Causes that are never a verdict."""
FLEET_ONLY = {"node-silent", "node-restarted"}
"""Causes that no single snapshot shows; their cases and look-alikes stand in tests/unit/fleet/test_judge.py."""
LAB_TEST = "tests/lab/test_verify.py::test_a_fault_gets_its_cause_layer_subject_and_chain"
faulty = [c for c in catalogue().values() if c.severity in ("warning", "critical") and c.slug != "unknown"]


@pytest.mark.parametrize("cause", faulty, ids=lambda c: c.slug)
def test_every_cause_has_a_case_and_a_look_alike(cause: Cause) -> None:
    assert cause.slug in {slug for slug, *_ in FAULTS} | FLEET_ONLY
    assert cause.slug in {slug for slug, *_ in LOOK_ALIKES} | FLEET_ONLY


@pytest.mark.parametrize("cause", catalogue().values(), ids=lambda c: c.slug)
def test_every_cause_is_shown_live_or_says_why_not(cause: Cause) -> None:
    assert bool(cause.shown_by) != bool(cause.not_shown)
    for test in cause.shown_by:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{test} is not there"


def test_a_cause_that_the_lab_plays_names_the_test_that_runs_it() -> None:
    played = {fault.cause for fault in faults().values()}
    assert played <= {c.slug for c in catalogue().values() if LAB_TEST in c.shown_by}


@pytest.mark.parametrize("cause", faulty, ids=lambda c: c.slug)
def test_every_fault_says_what_to_do_next_and_what_it_may_break(cause: Cause) -> None:
    assert cause.next
    assert all(step.command and step.why and step.risk for step in cause.next)


def test_every_slug_that_the_judge_writes_is_in_the_catalogue_and_the_other_way_round() -> None:
    directory = Path(case.__file__).parent
    written = set()
    for file in directory.glob("*.py"):
        named = re.findall(r'"([a-z][a-z0-9]*(?:-[a-z0-9]+)+)"', file.read_text(encoding="utf-8"))
        written |= set(named) & set(catalogue())
    said = {kind.cause for kind in loglines.kinds() if kind.cause}
    assert said <= set(catalogue())
    assert written | said | FLEET_ONLY >= {c.slug for c in faulty} | FINDINGS_ONLY
    assert set(judge._HARD_ORDER) <= set(catalogue())

"""`diagnose` names every fault of the lab, and is silent about its healthy states."""

from __future__ import annotations

import pytest

from vllmdiag.lab.faults import Fault, faults
from vllmdiag.lab.verify import run

CAN_RUN = [fault for fault in faults().values() if not fault.lacking()]


@pytest.mark.parametrize("fault", CAN_RUN, ids=lambda fault: fault.name)
def test_a_fault_gets_its_cause_layer_subject_and_chain(fault: Fault) -> None:
    result = run(fault, lambda _: None)
    assert result.misses == (), result.got
    assert result.outcome == "ok"

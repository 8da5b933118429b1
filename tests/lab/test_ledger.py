"""`ledger` of a live miniature: steps are seen, their parts add up to the time, and what is not known says why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllmdiag.lab.server import Lab, Shape


def test_the_parts_of_a_step_add_up_to_the_time_that_was_watched() -> None:
    with Lab(Shape(tp=2)) as lab:
        lab.wait_ready()
        before = lab.flags()
        lab.request(1_000_000)
        lab.wait_for("the rings move", lambda: lab.flags() != before)
        command = [sys.executable, "-m", "vllmdiag", "ledger", str(lab.root), "--window", "2", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    shares = [time["share"] for time in answer["times"] if time["share"] is not None]
    assert answer["steps_seen"] > 0
    assert sum(shares) == pytest.approx(1.0, abs=0.02)
    assert all(time["how"] for time in answer["times"])

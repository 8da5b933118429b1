"""`fleet node`: every server of a node is in the answer, watched side by side, and the dead ones are not."""

from __future__ import annotations

import io
import signal

from vllmdiag.fleet.node import answer
from vllmdiag.fleet.wire import Answer
from vllmdiag.lab.server import Lab, Shape


def test_two_servers_of_one_node_are_both_in_its_answer() -> None:
    with Lab(Shape(tp=1)) as one, Lab(Shape(tp=2)) as other:
        one.wait_ready()
        other.wait_ready()
        written = io.BytesIO()
        answer(0.5, 600, written.write)
        signal.alarm(0)  # it was to end its own process, which is this one
        taken = Answer("here", asked=0.0)
        assert taken.feed(written.getvalue(), 0.0)
        report = taken.report(1.0)
        seen = {pid for snapshot in report.snapshots for pid in snapshot.target_pids}
        assert report.outcome == "answered"
        assert {one.root, other.root} <= seen

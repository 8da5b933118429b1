"""`plan --check` holds a live miniature against its plan: equal where it is as planned, different where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from vllmdiag.lab.server import Lab, Shape


def check(pid: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllmdiag", "plan", "--check", str(pid), "--format", "json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if answer["agrees"] else 1), done.stderr
    return answer


def differing(answer: dict[str, Any]) -> list[str]:
    """What is not as planned."""
    return [c["what"] for c in answer["compared"] if not c["agrees"]]


SHAPES = [Shape(tp=2), Shape(pp=2), Shape(dp=2), Shape(tp=2, dp=2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"tp{s.tp}pp{s.pp}dp{s.dp}")
def test_a_whole_server_agrees_with_its_plan(shape: Shape) -> None:
    with Lab(shape) as lab:
        lab.wait_ready()
        answer = check(lab.root)
        assert differing(answer) == []
        assert {c["what"] for c in answer["compared"] if c["seen"]} >= {"Worker processes", "broadcast rings"}


def test_a_server_that_is_not_what_was_planned_differs() -> None:
    with Lab(Shape(tp=2)) as lab:
        lab.wait_ready()
        answer = check(lab.root, "--api-servers", "2")
        assert differing(answer) == [
            "Launcher processes",
            "APIServer processes",
            "unix sockets that listen",
            "connections to them",
        ]

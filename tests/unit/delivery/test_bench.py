"""The one form of the figures, and that every bench is run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.__main__ import names
from bench.table import Row, show
from tests.unit.delivery.conftest import ROOT


def test_every_bench_is_one_that_make_bench_runs() -> None:
    assert {"startup", "run_cost", "message_queue"} <= set(names())
    assert set(names()) == {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__main__", "table"}


def test_every_bench_says_in_its_first_lines_what_is_measured_and_beside_what() -> None:
    for name in names():
        text = (ROOT / "bench" / f"{name}.py").read_text(encoding="utf-8")
        assert text.startswith('"""'), name
        assert "def main(" in text, name


@pytest.mark.parametrize(
    ("row", "held"),
    [
        (Row("a", 1.0, 2.0, "peer", at_most=0.5), True),
        (Row("a", 1.1, 2.0, "peer", at_most=0.5), False),
        (Row("a", 4.0, 2.0, "peer", "/s", at_least=2.0), True),
        (Row("a", 3.9, 2.0, "peer", "/s", at_least=2.0), False),
        (Row("a", 9.0, 2.0, "peer"), True),
    ],
)
def test_a_figure_stands_beside_its_peer_and_is_held_to_its_bound(
    row: Row, held: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show("title", [row]) == int(not held)
    out = capsys.readouterr().out
    assert out.startswith("title\n")
    assert "peer" in out
    assert ("NOT HELD" in out) is not held


def test_a_bench_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "nosuch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "no bench nosuch; there are " in done.stderr

from __future__ import annotations

import msgspec
import pytest

from tests.unit.render import samples
from vllmdiag.model.view import MemberView, Party
from vllmdiag.render.page import Style
from vllmdiag.render.ps import ps_text
from vllmdiag.render.words import between, duration, fold_labels, number, plural, size, who, whom


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (None, ""),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (167772190, "160 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_sizes(n: float | None, said: str) -> None:
    assert size(n) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, ""),
        (0.04, "0.04 s"),
        (3, "3.0 s"),
        (41, "41 s"),
        (610, "10 min"),
        (5400, "1.5 h"),
        (86400, "24 h"),
        (200000, "2.3 d"),
    ],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_numbers_and_plurals() -> None:
    assert [number(value) for value in (0, 1200, 0.12345, 1234567.0)] == ["0", "1 200", "0.123", "1 234 567"]
    assert [plural(1, "process"), plural(2, "process"), plural(0, "slot")] == ["1 process", "2 processes", "0 slots"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], ""),
        (["EngineCore"], "EngineCore"),
        (["Worker_TP0", "Worker_TP1", "Worker_TP2", "Worker_TP5"], "Worker_TP0-2,5"),
        (
            ["EngineCore_DP0/Worker_TP0", "EngineCore_DP1/Worker_TP0"],
            "EngineCore_DP0/Worker_TP0, EngineCore_DP1/Worker_TP0",
        ),
        (["EngineCore", "Worker_TP3", "EngineCore"], "EngineCore, Worker_TP3"),
    ],
)
def test_equal_ranks_are_folded_and_others_named(labels: list[str], said: str) -> None:
    assert fold_labels(labels) == said


def test_a_party_is_named_with_its_pid_and_several_without() -> None:
    one, two = Party(label="Worker_TP0", pid=1), Party(label="Worker_TP1", pid=2)
    assert (who(one), who(None), who(Party(label="remote")), whom([one]), whom([one, two])) == (
        "Worker_TP0 (pid 1)",
        "not known",
        "remote",
        "Worker_TP0 (pid 1)",
        "Worker_TP0-1",
    )


def test_a_folded_group_says_its_range() -> None:
    assert between([1.0, None, 3.0], number) == "1..3"
    assert between([2.0, 2.0], number) == "2"
    assert between([None], number) == ""


def _workers(n: int, *, stopped: int) -> tuple[MemberView, ...]:
    return tuple(
        MemberView(
            pid=100 + rank,
            role="Worker",
            label=f"Worker_TP{rank}",
            state="T" if rank == stopped else "S",
            abnormal=rank == stopped,
            depth=2,
        )
        for rank in range(n)
    )


def test_many_equal_ranks_are_one_line_and_the_outlier_has_its_own() -> None:

    view = msgspec.structs.replace(samples.instance(), members=_workers(32, stopped=31), missing=())
    text = ps_text(view, Style())
    assert "Worker_TP0-30 (31)" in text
    assert "Worker_TP31 (pid 131) is stopped (T)" in text.splitlines()[1]
    assert len(text.splitlines()) == 6
    assert len(ps_text(view, Style(verbose=1)).splitlines()) == 36

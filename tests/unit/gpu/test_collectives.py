"""What the recorded RAS reports say of each rank, in both forms, when they are compared."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vllmdiag.diagnosis.collectives import absent, agreed, lagging, moved, pairs
from vllmdiag.diagnosis.gpu_view import lag_in_words
from vllmdiag.model.gpu import RasReport
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.ras_reports import from_json, from_text

SAMPLES = Path(__file__).parent / "ras"


def read(name: str, form: str) -> RasReport:
    path = SAMPLES / f"{name}.{form}"
    return from_json(path.read_bytes()) if form == "json" else from_text(path.read_text())


def twice(name: str, form: str) -> Snapshot:
    report = read(name, form)
    return Snapshot(ras=(report, msgspec.structs.replace(report, t=3.0)))


LAGS = {
    "lag_rank3": ((3,), "behind", "AllReduce", 811, 812),
    "none_launched": ((3,), "ahead", "AllReduce", 0, 1),
    "two_comms": ((2,), "behind", "AllReduce", 4, 5),
}
ABSENT = {
    "abort_rank1": (1, "abort"),
    "init_rank3": (3, "init"),
    "killed_70s": (5, "dead"),
    "killed_now": (5, "unresponsive"),
    "nocomm_rank2": (2, "left"),
    "stopped_70s": (5, "dead"),
    "stopped_now": (5, "unresponsive"),
}
NAMES = sorted(path.stem for path in SAMPLES.glob("*.json"))


@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rank_that_stands_apart_is_named_and_no_other(name: str, form: str) -> None:
    found = [
        (tuple(r.rank for r in lag.ranks), lag.relation, lag.collective, lag.low, lag.high)
        for lag in lagging(twice(name, form))
    ]
    if name == "split_4_4":
        named = (0, 1, 2, 3) if form == "json" else ()
        assert [(f[1], f[3], f[4]) for f in found] == [("split", 812, 813)]
        assert len(found[0][0]) == len(named)
    else:
        assert found == ([LAGS[name]] if name in LAGS else [])


@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_is_missing_or_in_error_is_named_with_the_reason(name: str, form: str) -> None:
    found = [(a.rank.rank, a.reason) for a in absent(twice(name, form))]
    if name == "async_error_rank2":
        assert [rank for rank, _ in found] == [2]
        assert "remote process" in found[0][1]
    else:
        assert found == ([ABSENT[name]] if name in ABSENT else [])


@pytest.mark.parametrize("form", ["json", "txt"])
def test_one_report_alone_leaves_open_whether_the_rank_moves(form: str) -> None:
    (lag,) = lagging(Snapshot(ras=(read("lag_rank3", form),)))
    assert lag.moving is None
    (lag,) = lagging(twice("lag_rank3", form))
    assert lag.moving is False


def test_counts_of_two_jobs_with_one_hash_are_not_compared_with_each_other() -> None:
    one = read("lag_rank3", "json")
    (communicator,) = one.communicators
    others = tuple(msgspec.structs.replace(rank, pid=(rank.pid or 0) + 1000) for rank in communicator.ranks)
    other = msgspec.structs.replace(one, communicators=(msgspec.structs.replace(communicator, ranks=others),))
    assert [pair.first for pair in pairs(Snapshot(ras=(one, other)))] == [None, None]


def test_counts_on_which_all_agree_are_told_and_whether_they_moved() -> None:
    first = read("healthy_tp8", "json")
    (pair,) = pairs(Snapshot(ras=(first, first)))
    assert agreed(pair.last) == {"AllGather": 40, "AllReduce": 812}
    assert moved(pair) is False
    (communicator,) = first.communicators
    more = tuple(msgspec.structs.replace(rank, counts={"AllReduce": 813}) for rank in communicator.ranks)
    later = msgspec.structs.replace(first, communicators=(msgspec.structs.replace(communicator, ranks=more),))
    (pair,) = pairs(Snapshot(ras=(first, later)))
    assert moved(pair) is True
    (pair,) = pairs(Snapshot(ras=(later,)))
    assert moved(pair) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lag_rank3", "rank 3 launched 811 AllReduce, others 812: has not come to the next one (not moving)"),
        ("none_launched", "rank 3 launched 1 AllReduce, the others 0: one that nobody else launched (not moving)"),
    ],
)
def test_a_lag_reads_as_a_sentence(name: str, words: str) -> None:
    (lag,) = lagging(twice(name, "json"))
    assert lag_in_words(lag) == words


def test_a_split_names_no_rank() -> None:
    (lag,) = lagging(twice("split_4_4", "txt"))
    assert lag_in_words(lag).startswith("ranks stand at 812 and at 813 AllReduce, as many here as there")

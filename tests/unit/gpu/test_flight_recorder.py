"""Dumps of torch's flight recorder: found, read without running them, compared, and asked for."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from vllmdiag.acts import flight_recorder as act
from vllmdiag.diagnosis.flight import Disagreement, disagreements, say
from vllmdiag.model.gpu import FlightEntry, FlightGroup, FlightRecord
from vllmdiag.model.process import Process
from vllmdiag.sources import flight_recorder as source

DUMPS = Path(__file__).parent / "fr"
STEM = "TORCH_FR_DUMP_TEMP_FILE"
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def myself(**more: object) -> Process:
    return msgspec.structs.replace(Process(pid=os.getpid(), uid=os.getuid(), age_s=3600.0), **more)


def read(stem: Path) -> tuple[list[FlightRecord], list[str]]:
    found, holes = source.records([myself()], [{STEM: str(stem)}])
    return found, [hole.why for hole in holes]


@pytest.mark.parametrize("form", ["pkl", "json"])
def test_the_rank_that_did_not_enter_is_named_on_a_dump_of_gloo(form: str) -> None:
    records = [source.parse((DUMPS / f"lag_rank{rank}.{form}").read_bytes(), rank) for rank in (0, 1)]
    (found,) = disagreements(records)
    assert (found.suspects, found.not_entered, found.waiting, found.seq) == ((1,), (1,), (0,), 4)
    assert say(found) == "all_reduce of 16 Float, rank 0 waits: rank 1 has not entered it"


@pytest.mark.parametrize("form", ["pkl", "json"])
def test_the_rank_that_entered_another_collective_is_named_on_a_dump_of_gloo(form: str) -> None:
    records = [source.parse((DUMPS / f"kind_rank{rank}.{form}").read_bytes(), rank) for rank in (0, 1)]
    (found,) = disagreements(records)
    assert (found.suspects, found.seq, found.undecided) == ((1,), 4, True)
    assert "rank 1 entered all_gather of 16 Float" in say(found)


def test_dumps_in_which_all_has_finished_do_not_disagree() -> None:
    assert disagreements([source.parse((DUMPS / "size_rank1.pkl").read_bytes(), 1)]) == ()


def entry(
    seq: int, op: str = "all_reduce", size: int = 16, *, retired: bool = False, dtype: str = "Float"
) -> FlightEntry:
    return FlightEntry(seq=seq, op=op, sizes=((size,),), dtypes=(dtype,), retired=retired)


def dump(rank: int, *entries: FlightEntry, ranks: tuple[int, ...] = (), **more: object) -> FlightRecord:
    group = FlightGroup(name="0", description="default_pg", ranks=ranks, entries=entries)
    return msgspec.structs.replace(FlightRecord(rank=rank, groups=(group,)), **more)


def only(*records: FlightRecord) -> Disagreement:
    (found,) = disagreements(records)
    return found


def test_the_one_rank_of_four_with_another_size_or_type_is_the_suspect() -> None:
    others = [dump(rank, entry(7)) for rank in (0, 1, 3)]
    assert only(*others, dump(2, entry(7, size=32))).suspects == (2,)
    assert only(*others, dump(2, entry(7, dtype="Half"))).suspects == (2,)
    assert say(only(*others, dump(2, entry(7, "broadcast")))) == (
        "all_reduce of 16 Float, rank 0-1,3 waits: rank 2 entered broadcast of 16 Float"
    )


def test_of_two_ranks_with_different_sizes_the_one_that_went_on_is_the_odd_one() -> None:
    found = only(dump(0, entry(4, size=32, retired=True)), dump(1, entry(4, size=16)))
    assert (found.suspects, found.waiting) == ((0,), (1,))


def test_a_collective_that_all_entered_alike_is_passed_over_for_the_first_that_does_not_fit() -> None:
    found = only(dump(0, entry(3), entry(4)), dump(1, entry(3)))
    assert (found.seq, found.suspects) == (4, (1,))


def test_a_member_without_a_dump_is_named() -> None:
    found = only(dump(0, entry(3), ranks=(0, 1, 2)), dump(2, entry(3), ranks=(0, 1, 2)))
    assert (found.suspects, found.no_dump) == ((1,), (1,))
    assert "there is no dump of rank 1" in say(found)


def test_a_rank_that_never_used_the_group_of_all_has_not_entered() -> None:
    assert only(dump(0, entry(1)), FlightRecord(rank=1)).not_entered == (1,)


def test_only_the_newest_dump_of_a_rank_counts() -> None:
    old = dump(1, entry(1), age_s=900.0)
    assert disagreements([dump(0, entry(2), age_s=5.0), old, dump(1, entry(2), age_s=4.0)]) == ()


def test_dumps_are_found_by_the_stem_of_the_server_and_come_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 0, 1):
        (tmp_path / f"trace_{rank}").write_bytes((DUMPS / "lag_rank0.pkl").read_bytes())
    (tmp_path / "trace_x").write_bytes(b"")
    (tmp_path / "other_3").write_bytes(b"")
    found, holes = read(tmp_path / "trace_")
    assert ([record.rank for record in found], holes) == ([0, 1, 10], [])
    assert found[0].path == str(tmp_path / "trace_0")
    assert {group.description for group in found[0].groups} == {"default_pg", "tp"}


def test_two_workers_with_one_file_system_give_each_dump_once(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes((DUMPS / "lag_rank0.pkl").read_bytes())
    found, _ = source.records([myself(), myself()], [{STEM: str(tmp_path / "trace_")}])
    assert len(found) == 1


def test_a_dump_older_than_the_server_is_of_another_one(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes((DUMPS / "lag_rank0.pkl").read_bytes())
    os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert read(tmp_path / "trace_") == ([], [])


def test_what_is_no_file_or_leads_elsewhere_is_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((DUMPS / "lag_rank0.pkl").read_bytes())
    (tmp_path / "trace_0").symlink_to(secret)
    os.mkfifo(tmp_path / "trace_1")
    (tmp_path / "trace_2").mkdir()
    assert read(tmp_path / "trace_") == ([], [])


@pytest.mark.needs("root")
def test_a_file_of_another_user_is_none_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes((DUMPS / "lag_rank0.pkl").read_bytes())
    os.chown(path, 65534, 65534)
    assert read(tmp_path / "trace_") == ([], [])


class Runs:
    """A dump that runs a command when pickle loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02}.",
        b"{}",
        b'{"entries": 7}',
        b'{"entries": [{"profiling_name": 1}]}',
        b"{" * 100_000,
        pickle.dumps(["entries"], 2),
        b"\xff" * 4096,
    ],
)
def test_a_broken_dump_is_missing_and_says_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(data)
    found, holes = read(tmp_path / "trace_")
    assert found == []
    assert ["it is no dump of plain values, and nothing of it was executed" in why for why in holes] == [True]


def test_a_malicious_dump_is_missing_and_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [Runs(tmp_path / "ran")], "version": "2.10"}, 2))
    found, holes = read(tmp_path / "trace_")
    assert (found, len(holes)) == ([], 1)
    assert not (tmp_path / "ran").exists()


def test_a_dump_too_large_to_be_one_is_missing(tmp_path: Path) -> None:
    with open(tmp_path / "trace_0", "wb") as file:
        file.truncate(source.MAX_BYTES + 1)
    found, holes = read(tmp_path / "trace_")
    assert (found, ["larger than 64 MiB" in why for why in holes]) == ([], [True])


def test_a_dump_that_names_a_group_by_unusual_values_is_read_as_far_as_it_goes() -> None:
    raw = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[4, "x"], 7], "pg_id": "a"}
    record = source.parse(json.dumps({"entries": [raw, 5, {"is_p2p": True}], "pg_status": 3}).encode(), 0)
    assert record.groups[0].entries == (FlightEntry(seq=1, op="all_reduce", sizes=((4,), ())),)


@pytest.fixture
def rank_with_pipe(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A thread that does as torch's monitor does: reads the pipe, then writes a dump."""
    threads: list[threading.Thread] = []
    fds: list[int] = []

    def start(rank: int, answers: bool = True) -> None:
        path = tmp_path / f"pipe_{rank}.pipe"
        os.mkfifo(path)
        fd = os.open(path, os.O_RDWR)
        fds.append(fd)

        def serve() -> None:
            os.read(fd, 1)
            if answers:
                (tmp_path / f"trace_{rank}").write_bytes((DUMPS / f"lag_rank{rank}.pkl").read_bytes())

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(20)
    for fd in fds:
        os.close(fd)


def ask(tmp_path: Path, **environ: str) -> tuple[list[FlightRecord], list[str]]:
    environment = {STEM: str(tmp_path / "trace_"), PIPE: str(tmp_path / "pipe_"), **environ}
    found, holes = act.trigger([myself(environ=environment)])
    return found, [hole.why for hole in holes]


def test_each_rank_with_a_pipe_is_asked_and_its_dump_is_read(
    tmp_path: Path, rank_with_pipe: Callable[..., None]
) -> None:
    rank_with_pipe(0)
    rank_with_pipe(1)
    found, holes = ask(tmp_path)
    assert ([record.rank for record in found], holes) == ([0, 1], [])
    assert only(*found).suspects == (1,)


def test_a_rank_that_does_not_write_is_told(
    tmp_path: Path, rank_with_pipe: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act, "WAIT_S", 0.5)
    rank_with_pipe(0, answers=False)
    found, holes = ask(tmp_path)
    assert (found, len(holes)) == ([], 1)
    assert "not all wrote a dump" in holes[0]


def test_a_pipe_that_nobody_reads_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe_0.pipe")
    assert "nobody reads them" in ask(tmp_path)[1][0]


def test_a_file_in_place_of_a_pipe_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "pipe_0.pipe").write_bytes(b"mine")
    assert "no rank has a pipe" in ask(tmp_path)[1][0]
    assert (tmp_path / "pipe_0.pipe").read_bytes() == b"mine"

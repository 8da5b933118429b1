from __future__ import annotations

import gzip
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.errors import BadDataError, NotPermittedError, UsageError
from vllmdiag.model.recording import (
    Begin,
    EventLine,
    FlagsLine,
    Line,
    MemberLine,
    RecordedMember,
    RecordedRing,
    SeenLine,
)
from vllmdiag.model.ring import Geometry
from vllmdiag.model.view import Party
from vllmdiag.model.watch import Event
from vllmdiag.watch.recording import RecordingWriter, read_recording

GEOMETRY = Geometry(chunks=3, chunk_bytes=1 << 20, n_readers=2)
RING = RecordedRing(
    segment="psm_1",
    queue="broadcast ring",
    geometry=GEOMETRY,
    writer=Party(label="EngineCore", pid=2),
    readers=(Party(label="Worker_TP0", pid=3), None),
)
BEGIN = Begin(
    at="2026-12-01T07:00:00.000Z",
    hz=100.0,
    pid=1,
    members=(RecordedMember(pid=3, role="Worker", label="Worker_TP0"),),
    rings=(RING,),
)
UNREAD, READ = "100" * 3, "111" * 3


def flags(t: float, rows: str, ring: int = 0) -> FlagsLine:
    return FlagsLine(t=t, ring=ring, flags=bytes(int(flag) for flag in rows).hex())


def record(path: Path, *lines: FlagsLine | MemberLine | SeenLine | EventLine, max_bytes: int = 1 << 20) -> None:
    writer = RecordingWriter(path, max_bytes)
    writer.begin(BEGIN)
    for line in lines:
        writer.write(line)
    writer.close()


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r"
    event = EventLine(t=2.0, event=Event(at=BEGIN.at, kind="stall", summary="nothing moves"))
    stopped = MemberLine(t=1.5, pid=3, state="T", doing="stopped")
    record(path, flags(0.0, READ), flags(1.0, UNREAD), stopped, event, SeenLine(t=4.0))
    (generation,) = read_recording(path).generations
    assert generation.begin == BEGIN
    assert generation.end_s == 4.0
    assert generation.events == (event,)
    assert generation.member_at(3, 1.4) is None
    assert generation.member_at(3, 9.0) == stopped
    (track,) = generation.tracks
    state = track.state_at(3.0)
    assert state is not None
    assert state.full
    assert track.still_since(3.0) == 1.0
    assert [t for t, _ in track.between(0.5, 4.0)] == [0.5, 1.0]
    assert not read_recording(path).cut


def test_it_is_gzip_with_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, flags(0.0, READ), SeenLine(t=1.0))
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [line["kind"] for line in lines] == ["begin", "flags", "seen"]
    assert lines[0]["schema"] == "vllmdiag.recording/1"
    schema = msgspec.json.schema(Line)
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(line)


def test_the_file_stays_within_its_bound_and_what_is_left_is_the_newest_part(tmp_path: Path) -> None:
    path = tmp_path / "r"
    bound = 20_000
    writer = RecordingWriter(path, bound)
    writer.begin(BEGIN)
    writer.write(MemberLine(t=0.0, pid=3, state="S", doing="waits"))
    for i in range(5000):
        writer.write(flags(float(i), READ if i % 2 else UNREAD))
        assert path.stat().st_size <= bound
    writer.close()
    (generation,) = read_recording(path).generations
    assert generation.end_s == 4999.0
    assert 0.0 < generation.start_s < 4999.0
    assert generation.tracks[0].state_at(4998.0) == generation.tracks[0].state_at(4996.0)
    last = generation.member_at(3, 4999.0)
    assert last is not None, "what never changed is known although its first line was dropped"
    assert last.doing == "waits"
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_one_that_was_being_written_when_its_writer_died_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "r"
    writer = RecordingWriter(path)
    writer.begin(BEGIN)
    writer.write(flags(0.0, READ), SeenLine(t=7.0))
    alive = read_recording(path)
    assert alive.cut
    assert alive.generations[0].end_s == 7.0
    writer.close()


def test_a_restarted_server_is_a_generation_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "r"
    writer = RecordingWriter(path)
    for generation in (1, 2):
        writer.begin(msgspec.structs.replace(BEGIN, generation=generation, pid=generation))
        writer.write(flags(0.0, READ), SeenLine(t=3.0))
    writer.close()
    assert [(g.begin.pid, g.end_s) for g in read_recording(path).generations] == [(1, 3.0), (2, 3.0)]


def test_a_ring_that_comes_later_is_of_the_same_generation(tmp_path: Path) -> None:
    path = tmp_path / "r"
    later = msgspec.structs.replace(RING, segment="psm_2")
    writer = RecordingWriter(path)
    writer.begin(BEGIN)
    writer.write(flags(0.0, READ))
    writer.begin(msgspec.structs.replace(BEGIN, rings=(later, RING)))
    writer.write(flags(1.0, UNREAD), flags(1.0, READ, ring=1), SeenLine(t=2.0))
    writer.close()
    (generation,) = read_recording(path).generations
    by_name = {track.ring.segment: track.times for track in generation.tracks}
    assert by_name == {"psm_1": (0.0,), "psm_2": (1.0,)}


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.text("01", min_size=9, max_size=9)), max_size=40))
def test_the_flags_at_any_time_are_the_last_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, str]]
) -> None:
    path = tmp_path_factory.mktemp("recording") / "r"
    t, written = 0.0, []
    for wait, rows in steps:
        t += wait + 1e-3
        written.append((t, rows))
    record(path, *(flags(t, rows) for t, rows in written), SeenLine(t=t + 1), max_bytes=1 << 20)
    (track,) = read_recording(path).generations[0].tracks
    for when, rows in written:
        i = max(k for k, at in enumerate(track.times) if at <= when)
        assert track.flags[i] == bytes(int(flag) for flag in rows)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"no gzip at all", "not a gzip file"),
        (gzip.compress(b'{"kind": "seen", "t": 1.0}\n'), "does not begin with"),
        (gzip.compress(b'{"kind": "begin", "at": "", "schema": "vllmdiag.recording/2"}\n'), "recording/2"),
        (gzip.compress(b"{}\n"), "none of a recording"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "r"
    path.write_bytes(data)
    with pytest.raises(BadDataError) as caught:
        read_recording(path)
    assert why in caught.value.why


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDataError):
        read_recording(tmp_path / "none")


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises((UsageError, NotPermittedError)):
        RecordingWriter(tmp_path / "no" / "such" / "directory")

"""`report` from the command line to the file: every kind of input, and what it refuses."""

from __future__ import annotations

import gzip
import io
import os
import pty
import sys
from contextlib import redirect_stdout
from pathlib import Path

import msgspec
import pytest

from tests.unit.diagnosis import test_causes as causes
from tests.unit.report import pages
from tests.unit.report.reading import Reading
from vllmdiag.bundle.pack import pack
from vllmdiag.cli.main import main
from vllmdiag.model.errors import ExitCode
from vllmdiag.model.recording import FlagsLine, SeenLine
from vllmdiag.watch.recording import RecordingWriter


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.json"
    path.write_bytes(msgspec.json.encode(pages.snapshot_of(causes.worker_stopped)))
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "night.rec"
    (generation,) = pages.recording().generations
    writer = RecordingWriter(path)
    writer.begin(generation.begin)
    (track,) = generation.tracks
    writer.write(*(FlagsLine(t=t, ring=0, flags=f.hex()) for t, f in zip(track.times, track.flags, strict=True)))
    writer.write(SeenLine(t=60.0))
    writer.close()
    return path


def _lines(path: Path) -> list[str]:
    return Reading(path.read_text(encoding="utf-8")).text().splitlines()


def test_a_snapshot_becomes_a_page(snapshot: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(snapshot), "-o", str(page)]) == ExitCode.OK
    assert _lines(page)[0] == "CRITICAL process-stopped · Worker_TP1 (pid 301) is stopped (T)"


def test_a_bundle_gives_the_page_of_the_snapshot_in_it(snapshot: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "incident.tar.gz"
    bundle.write_bytes(pack([pages.snapshot_of(causes.worker_stopped)]))
    for source, page in ((snapshot, "a.html"), (bundle, "b.html")):
        assert main(["report", str(source), "-o", str(tmp_path / page)]) == ExitCode.OK
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_standard_input_to_standard_output(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(snapshot.read_bytes())))
    assert main(["report", "-", "-o", "-"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_a_recording_becomes_a_page_of_its_rings(recording: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(recording), "-o", str(page)]) == ExitCode.OK
    assert _lines(page)[0] == "A recording of 1 ring · vllmdiag"
    assert "Worker_TP1 at most 10, at the end 10" in _lines(page)


def test_a_recording_stands_beside_the_diagnosis_where_both_are_given(
    snapshot: Path, recording: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(snapshot), "--recording", str(recording), "-o", str(page)]) == ExitCode.OK
    assert {"✗ CRITICAL", "Unread by reader, night.rec", "Unread by reader, the window"} <= set(_lines(page))


def test_a_file_that_is_there_is_replaced_only_when_asked_to(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    assert main(["report", str(snapshot), "-o", str(page)]) == ExitCode.USAGE
    assert page.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["report", str(snapshot), "-o", str(page), "--force"]) == ExitCode.OK
    assert page.read_text().startswith("<!doctype html>")


def test_a_terminal_is_no_place_for_a_page(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as out, redirect_stdout(out):
            assert main(["report", str(snapshot)]) == ExitCode.USAGE
    finally:
        os.close(master)
    assert "-o report.html" in capsys.readouterr().err


def _not_ours(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"no archive, no recording"))
    return path


def _cut_off(path: Path) -> Path:
    path.write_bytes(pack([pages.snapshot_of()])[:200])
    return path


@pytest.mark.parametrize(
    ("make", "code"),
    [(lambda path: path, ExitCode.NO_TARGET), (_not_ours, ExitCode.BAD_DATA), (_cut_off, ExitCode.BAD_DATA)],
    ids=["nothing", "not ours", "cut off"],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(
    make: object, code: ExitCode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert callable(make)
    assert main(["report", str(make(tmp_path / "file")), "-o", str(page)]) == code
    assert not page.exists()
    assert "next:" in capsys.readouterr().err


def test_a_port_belongs_to_a_live_instance(snapshot: Path) -> None:
    assert main(["report", str(snapshot), "--port", "8000", "-o", "-"]) == ExitCode.USAGE

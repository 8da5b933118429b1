"""A bundle of a running server: the verdict of the moment comes out of it again, redacted or not, byte for byte."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmdiag.bundle.archive import read_bundle
from vllmdiag.cli.main import main
from vllmdiag.lab.faults import named
from vllmdiag.lab.inject import inject
from vllmdiag.lab.server import Lab
from vllmdiag.model.errors import ExitCode


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    fault = named("worker-stopped")
    with Lab(fault.start()) as lab:
        lab.wait_ready()
        inject(lab, fault)
        yield lab


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def member(path: Path, name: str) -> bytes:
    with tarfile.open(path) as tar:
        content = tar.extractfile(next(m for m in tar if m.name.endswith(f"/{name}")))
        assert content is not None
        return content.read()


@pytest.mark.parametrize("option", ["--redact", "--no-redact"])
def test_the_verdict_that_was_captured_is_given_again_byte_for_byte(
    option: str, lab: Lab, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.tar.gz"
    assert main(["capture", str(lab.root), option, "--window", "1.5", "-o", str(path)]) == ExitCode.OK
    said = capfdbinary.readouterr()
    assert b"critical: process-stopped" in said.out
    assert (b"--no-redact" in said.err) == (option == "--no-redact")
    assert main(["diagnose", "--from", str(path), "--format", "json"]) == ExitCode.CRITICAL
    out = capfdbinary.readouterr().out
    assert out == member(path, "diagnosis.json")
    assert json.loads(out)["verdict"]["cause"] == "process-stopped"
    assert main(["triage", str(path), "--format", "json"]) == ExitCode.CRITICAL
    assert capfdbinary.readouterr().out == out
    bare = tmp_path / "snapshot.json"
    bare.write_bytes(member(path, "snapshot.json"))
    assert main(["diagnose", "--from", str(bare), "--format", "json"]) == ExitCode.CRITICAL
    assert capfdbinary.readouterr().out == out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert main(["diagnose", "--from", "-", "--format", "json"]) == ExitCode.CRITICAL
    assert capfdbinary.readouterr().out == out


def test_every_verb_of_one_layer_shows_a_bundle_as_it_shows_the_machine(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "b.tar.gz")
    main(["capture", str(lab.root), "--window", "1.5", "-o", path])
    capsys.readouterr()
    for verb in ("ps", "endpoints", "shm", "ring", "stacks", "client"):
        assert main([verb, "--from", path]) == ExitCode.OK
        assert "Worker_TP1" in capsys.readouterr().out or verb == "client"
    for wrong in (["--port", "1"], ["--window", "3"], [str(lab.root)]):
        assert main(["diagnose", "--from", path, *wrong]) == ExitCode.USAGE
    assert main(["shm", "clean", "--from", path]) == ExitCode.USAGE
    assert main(["gpu", "--trigger-fr", "--from", path]) == ExitCode.USAGE


def test_a_series_holds_what_was_seen_one_after_the_other_and_the_bundle_goes_down_a_pipe(
    lab: Lab, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["capture", str(lab.root), "--window", "3", "--every", "1", "-o", "-"]) == ExitCode.OK
    bundle = read_bundle(io.BytesIO(capfdbinary.readouterr().out))
    assert bundle.manifest is not None
    assert [moment.cause for moment in bundle.manifest.snapshots] == ["process-stopped"] * len(bundle.snapshots)
    times = [snapshot.observed_at for snapshot in bundle.snapshots]
    assert times == sorted(set(times))


def test_an_estimate_is_of_the_right_size_and_does_nothing(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["capture", str(lab.root), "--estimate", "--format", "json"]) == ExitCode.OK
    estimate = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    main(["capture", str(lab.root), "--format", "json"])
    (path,) = tmp_path.glob("vllmdiag-*.tar.gz")
    assert json.loads(capsys.readouterr().out)["redaction"]["key"] == "host"
    assert estimate["size"] / 4 < path.stat().st_size < estimate["size"] * 4


def test_a_bundle_that_was_not_redacted_can_be_redacted_later(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, red = tmp_path / "raw.tar.gz", tmp_path / "red.tar.gz"
    main(["capture", str(lab.root), "--window", "1", "--no-redact", "-o", str(raw)])
    assert main(["capture", "--from", str(raw), "-o", str(red)]) == ExitCode.OK
    capsys.readouterr()
    assert read_bundle(raw).snapshot.node.hostname == os.uname().nodename
    assert read_bundle(red).snapshot.node.hostname.startswith("host-")
    assert main(["capture", "--from", str(raw), "-o", str(red)]) == ExitCode.USAGE
    assert main(["diff", str(raw), str(red)]) == 0


def test_a_series_without_an_end_or_with_too_many_looks_is_refused(lab: Lab) -> None:
    assert main(["capture", str(lab.root), "--every", "5"]) == ExitCode.USAGE
    assert main(["capture", str(lab.root), "--every", "1", "--window", "600"]) == ExitCode.USAGE


def test_diff_names_the_worker_that_goes_on(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    main(["capture", str(lab.root), "--window", "1", "-o", before])
    stopped = read_bundle(before).manifest
    assert stopped is not None
    worker = next(w for w in stopped.target.worker_pids if _state(w) == "T")
    os.kill(worker, signal.SIGCONT)
    main(["capture", str(lab.root), "--window", "1", "-o", after])
    capsys.readouterr()
    assert main(["diff", before, after, "--format", "json"]) == 1
    diff = json.loads(capsys.readouterr().out)
    changed = next(p for p in diff["processes"] if p["name"] == "Worker_TP1")
    assert (changed["fate"], changed["pid_before"]) == ("same", worker)
    assert "T" in {c["before"] for c in changed["changes"] if c["what"] == "state"}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]

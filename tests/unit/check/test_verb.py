"""`check` from the command line, on a miniature server: exit codes, forms, baseline, and scrapes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllmdiag.lab.server import Lab, Shape
from vllmdiag.model.errors import ExitCode

COMMAND = [sys.executable, "-m", "vllmdiag", "check"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Shape(tp=2)) as lab:
        lab.wait_ready()
        yield lab


@pytest.fixture
def stopped(lab: Lab) -> Iterator[int]:
    pid = lab.pid("Worker_TP1")
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


def check(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, check=False)


def test_a_probe_gets_one_line_and_its_exit_code(lab: Lab) -> None:
    for profile in ("liveness", "readiness"):
        done = check(lab.root, "--profile", profile)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("OK  idle: ")
        assert done.stdout.count("\n") == 1


def test_a_pipeline_gets_what_it_expects(lab: Lab) -> None:
    ci = (lab.root, "--profile", "ci", "--window", "1")
    expected = check(*ci, "--expect", "tp=2,pp=1,dp=1,ready", "--expect", "health,metrics,workers=2")
    assert expected.returncode == 0, expected.stdout
    assert check(*ci, "--expect", "tp=4").returncode == ExitCode.CRITICAL


def test_a_stopped_worker_is_critical_while_health_answers(lab: Lab, stopped: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{lab.port}/health") as answer:
        assert answer.status == 200
    done = check(lab.root, "--profile", "liveness")
    assert done.returncode == ExitCode.CRITICAL
    assert "process-stopped" in done.stdout
    assert str(stopped) in done.stdout


def test_what_was_known_is_no_news(lab: Lab, stopped: int, tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    assert check(lab.root, "--window", "1", "--baseline", file, "--write-baseline").returncode == 0
    done = check(lab.root, "--window", "1", "--baseline", file)
    assert done.returncode == 0
    assert "process-stopped (known)" in done.stdout
    assert check(lab.root, "--window", "1", "--ignore", "process-stopped=Worker_TP1").returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--expect", "tp"), ExitCode.USAGE, "tp needs a value"),
        (("--ignore", "no-such-cause"), ExitCode.USAGE, "no cause is called"),
        (("--write-baseline",), ExitCode.USAGE, "--baseline FILE"),
        (("--baseline", "/none"), ExitCode.BAD_DATA, "is no baseline"),
        (("--listen", "nowhere"), ExitCode.USAGE, "is no address"),
        (("--format", "yaml"), ExitCode.USAGE, "yaml"),
    ],
)
def test_what_cannot_be_asked_is_told(args: tuple[str, ...], code: ExitCode, words: str) -> None:
    done = check(os.getpid(), *args)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stdout == ""


def test_no_target_is_66_and_unknown_to_nagios() -> None:
    assert check(os.getpid()).returncode == ExitCode.NO_TARGET
    done = check(os.getpid(), "--format", "nagios")
    assert done.returncode == ExitCode.UNKNOWN
    assert done.stdout.startswith("VLLM UNKNOWN - ")
    assert done.stderr == ""


def test_out_of_time_is_75(lab: Lab) -> None:
    done = check(lab.root, "--window", "20", "--timeout", "0.5")
    assert done.returncode == ExitCode.TIMED_OUT
    assert "no answer within 0.5 s" in done.stderr


def _status(url: str) -> float:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    return next(f.samples[0].value for f in text_string_to_metric_families(text) if f.name == "vllmdiag_status")


@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGTERM, ExitCode.OK), (signal.SIGINT, ExitCode.INTERRUPTED)], ids=["term", "ctrl-c"]
)
def test_scrapes_are_answered_until_it_is_ended_and_its_port_is_free_then(
    lab: Lab, ending: signal.Signals, code: ExitCode
) -> None:
    arguments = [str(lab.root), "--window", "0.5", "--listen", "127.0.0.1:0", "--every", "1"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        url = exporter.stderr.readline().strip()
        assert _status(url) == 0
        exporter.send_signal(ending)
        assert exporter.wait(10) == code
    with pytest.raises(OSError, match="refused"):
        _status(url)


def test_a_scrape_of_what_is_not_there_says_unknown() -> None:
    arguments = [str(os.getpid()), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        assert _status(exporter.stderr.readline().strip()) == 3
        exporter.terminate()
        assert exporter.wait(10) == ExitCode.OK

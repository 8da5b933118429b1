"""Whatever happens to a lab, nothing of it lives on: real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vllmdiag.lab import lifeline, procs
from vllmdiag.lab.leftovers import clear_up
from vllmdiag.lab.server import PREFIX

MEMBER = """
import os, signal, sys
from vllmdiag.lab import lifeline
lifeline.hang_on()
if os.fork() == 0:
    signal.pause()
print("hanging on", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def member(work: Path) -> subprocess.Popen[str]:
    """A process of the lab, in a group of its own, that has a child and stops itself."""
    env = {**os.environ, lifeline.ENV: str(work)}
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def group(pgid: int) -> list[int]:
    return [p.pid for p in procs.scan() if p.pgid == pgid and p.state not in "ZX"]


def wait_until_empty(pgid: int) -> None:
    deadline = time.monotonic() + 20
    while group(pgid):
        assert time.monotonic() < deadline, group(pgid)
        time.sleep(0.02)


def test_a_stopped_member_and_its_child_die_with_the_one_who_held_the_line(tmp_path: Path) -> None:
    line = lifeline.hold(tmp_path)
    with member(tmp_path) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "hanging on\n"
            assert len(group(started.pid)) == 2
            os.close(line)
            assert started.wait(20) == -signal.SIGKILL
            wait_until_empty(started.pid)
        finally:
            for pid in group(started.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_line_is_held_until_its_holder_lets_go(tmp_path: Path) -> None:
    line = lifeline.hold(tmp_path)
    assert lifeline.held(tmp_path)
    os.close(line)
    assert not lifeline.held(tmp_path)


def test_who_starts_after_the_lab_has_ended_ends_at_once(tmp_path: Path) -> None:
    os.close(lifeline.hold(tmp_path))
    with member(tmp_path) as started:
        _, errors = started.communicate(timeout=20)
    assert started.returncode == 1
    assert "has ended" in errors


def test_the_miniature_does_not_run_without_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifeline.ENV, raising=False)
    with pytest.raises(SystemExit, match="lab up"):
        lifeline.hang_on()


def test_only_the_directory_of_a_lab_that_has_ended_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    starting = tmp_path / f"{PREFIX}{os.getpid()}-aaaaaaaa"
    over = tmp_path / f"{PREFIX}{ended.pid}-bbbbbbbb"
    for path in (starting, over):
        path.mkdir()
    assert str(over) in clear_up()
    assert list(tmp_path.iterdir()) == [starting]
    assert clear_up() == ""

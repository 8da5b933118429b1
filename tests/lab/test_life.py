"""A lab from its start to its end: every shape serves, and whatever ends it, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllmdiag.lab import procs
from vllmdiag.lab.server import Lab, LabError, Shape
from vllmdiag.model.errors import UsageError

COMMAND = [sys.executable, "-m", "vllmdiag", "lab"]


def living(pgid: int) -> list[int]:
    return [p.pid for p in procs.scan() if p.pgid == pgid and p.state not in "ZX"]


def left(names: set[str]) -> set[str]:
    return {name for name in names if (Path("/dev/shm") / name).exists()}


@pytest.mark.parametrize(
    ("shape", "processes"),
    [
        (Shape(tp=1), 4),
        (Shape(tp=2), 5),
        (Shape(tp=1, pp=2), 5),
        (Shape(tp=2, pp=2), 7),
        (Shape(tp=2, dp=2), 11),
        (Shape(tp=2, nodes=2), 7),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, int) else f"tp{value.tp} pp{value.pp} dp{value.dp} n{value.nodes}"
    ),
)
def test_every_shape_serves_and_leaves_nothing(shape: Shape, processes: int) -> None:
    with Lab(shape) as lab:
        lab.wait_ready()
        assert len(lab.processes()) == processes
        segments = lab.note_segments()
        assert segments
        status, text = lab.request(5).result()
        assert status == 200
        assert '"completion_tokens": 5' in text
        root, work = lab.root, lab.work
    assert living(root) == []
    assert left(segments) == set()
    assert not work.exists()


def test_a_server_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot play"):
        Lab(Shape(tp=3, nodes=2))


def test_a_temporary_directory_with_too_long_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 60)
    with pytest.raises(UsageError, match="too long") as caught:
        Lab(Shape())
    assert "TMPDIR" in caught.value.next


def test_a_server_that_ends_while_it_starts_is_told_with_its_log() -> None:
    with pytest.raises(LabError, match="in vain") as caught, Lab(Shape(env=(("VLLMDIAG_LAB_HWM", "many"),))) as lab:
        lab.wait_ready()
    assert "many" in caught.value.why


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="lab") as path:
        yield Path(path)


@contextmanager
def up(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`vllmdiag lab up`, with the pid of the server it has started."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*COMMAND, "up", *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            assert started.stdout is not None
            text = started.stdout.readline() + started.stdout.readline()
            found = re.search(r"vllmdiag diagnose (\d+)", text)
            assert found, text
            yield started, int(found[1])
        finally:
            started.kill()


def held(pgid: int) -> set[str]:
    return {name for pid in living(pgid) for name in procs.segments(pid)}


def test_a_fault_goes_into_the_server_that_was_asked_for(short_tmp: Path) -> None:
    with up(short_tmp, "--fault", "worker-stopped", "--tp", "3") as (started, root):
        assert started.stdout is not None
        assert any("in place; expected: process-stopped" in line for line in started.stdout)
        workers = [p for p in procs.scan() if p.pgid == root and "Worker_TP" in p.title]
        assert sorted((p.title.rsplit("_", 1)[-1], p.state == "T") for p in workers) == [
            ("TP0", False),
            ("TP1", True),
            ("TP2", False),
        ]
        started.send_signal(signal.SIGINT)
        assert started.wait(30) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_lab_and_nothing_is_left(number: signal.Signals, short_tmp: Path) -> None:
    with up(short_tmp) as (started, root):
        segments = held(root)
        started.send_signal(number)
        assert started.wait(30) == 130
    assert living(root) == []
    assert left(segments) == set()
    assert list(short_tmp.iterdir()) == []


def test_kill_9_leaves_no_process_and_the_next_lab_says_what_it_left(short_tmp: Path) -> None:
    with up(short_tmp) as (started, root):
        segments = held(root)
        started.kill()
        started.wait()
        deadline = time.monotonic() + 20
        while living(root):
            assert time.monotonic() < deadline, living(root)
            time.sleep(0.02)
    try:
        assert len(left(segments)) == 4
        env = {**os.environ, "TMPDIR": str(short_tmp)}
        after = subprocess.run(
            [*COMMAND, "run", "idle", "--window", "1"], env=env, capture_output=True, text=True, check=False
        )
        assert "a lab was killed before" in after.stderr
        assert "vllmdiag shm clean" in after.stderr
        assert all(name in after.stderr for name in segments)
        assert list(short_tmp.iterdir()) == []
    finally:
        for name in left(segments):
            (Path("/dev/shm") / name).unlink()

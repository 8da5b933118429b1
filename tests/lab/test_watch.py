"""`watch` on a miniature server: what it captures, survives and leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pexpect
import pytest

from vllmdiag.bundle.archive import read_bundle
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.lab.server import Lab, Shape
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.document import json_schema
from vllmdiag.watch.recording import read_recording

COMMAND = [sys.executable, "-m", "vllmdiag"]
PATIENCE_S = 60.0


class Watch:
    """A `watch --headless` and the events that it has given."""

    def __init__(self, directory: Path, *args: object) -> None:
        self.directory = directory
        self._log = directory / "events"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "watch", *map(str, args), "--headless", "--bundles", str(directory)], stdout=log
            )

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """The event of that kind with that number."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = [event for event in self.events if event["kind"] == kind]
            if len(found) >= count:
                return found[count - 1]
            assert self.process.poll() is None, self.events
            assert time.monotonic() < end, f"no {kind} among {self.events}"
            time.sleep(0.1)

    def bundles(self) -> list[Path]:
        return sorted(self.directory.glob("vllmdiag-watch-*.tar.gz"))

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(20)


@contextmanager
def watching(directory: Path, *args: object) -> Iterator[Watch]:
    watch = Watch(directory, *args)
    try:
        yield watch
    finally:
        if watch.process.poll() is None:
            watch.process.kill()
        watch.process.wait()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(Shape(tp=2)) as lab:
        lab.wait_ready()
        yield lab


def stop(lab: Lab, name: str) -> int:
    pid = lab.pid(name)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_stall_that_was_killed_after_8_seconds_is_judged_rightly_from_the_bundle(lab: Lab, tmp_path: Path) -> None:
    with watching(tmp_path, lab.root, "--stall", 3, "--record", tmp_path / "rec") as watch:
        watch.wait_for("watching")
        lab.request(3).result()
        worker = stop(lab, "Worker_TP1")
        began = time.monotonic()
        lab.request(100)
        while time.monotonic() - began < 8.0:
            time.sleep(0.1)
        lab.kill_all()
        watch.wait_for("ended")
        stall, captured = watch.wait_for("stall"), watch.wait_for("captured")
        assert watch.end() == ExitCode.OK
    assert (stall["cause"], stall["subject"]["pid"]) == ("process-stopped", worker)
    verdict = diagnose(read_bundle(captured["bundle"]).snapshot).verdict
    assert (verdict.cause, verdict.subject.label, verdict.status) == ("process-stopped", "Worker_TP1", "critical")
    said = subprocess.run([*COMMAND, "diagnose", "--from", captured["bundle"]], capture_output=True, check=False)
    assert said.returncode == ExitCode.CRITICAL
    (generation,) = read_recording(tmp_path / "rec").generations
    state = generation.member_at(worker, generation.end_s - 4.0)
    assert state is not None
    assert [e.event.kind for e in generation.events if e.event.kind in ("stall", "captured")][:2] == [
        "stall",
        "captured",
    ]
    ring = next(t for t in generation.tracks if t.ring.queue == "broadcast ring")
    assert len(ring.times) > 1, "the messages before the stall are in the recording"


def test_every_event_fits_the_published_schema(lab: Lab, tmp_path: Path) -> None:
    schema = jsonschema.Draft202012Validator(json.loads(json_schema("event")))
    with watching(tmp_path, lab.root, "--stall", 2, "--status", 1) as watch:
        watch.wait_for("status")
        stop(lab, "EngineCore")
        watch.wait_for("captured")
        os.kill(lab.pid("EngineCore"), signal.SIGCONT)
        recovered = watch.wait_for("recovered")
        assert watch.end() == ExitCode.OK
        kinds = [event["kind"] for event in watch.events]
        for event in watch.events:
            schema.validate(event)
    assert recovered["generation"] == 1
    assert kinds[0] == "watching"
    assert kinds[-1] == "stopped"
    assert kinds.count("captured") == 1, "one incident is one bundle"


def test_a_death_is_captured_at_once_and_told_to_the_command(lab: Lab, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = f'echo "$VLLMDIAG_CAUSE $VLLMDIAG_SUBJECT $VLLMDIAG_PID" > {told}; test -f "$VLLMDIAG_BUNDLE"'
    with watching(tmp_path, lab.root, "--stall", 60, "--on-stall", command) as watch:
        watch.wait_for("watching")
        worker = lab.pid("Worker_TP1")
        os.kill(worker, signal.SIGKILL)
        died = watch.wait_for("died")
        assert watch.wait_for("command")["exit_code"] == 0
        assert watch.end() == ExitCode.OK
    assert died["cause"] in ("worker-dead", "engine-dead")
    assert told.read_text().split()[0] == died["cause"]


def test_a_restarted_server_is_a_new_generation_and_none_is_waited_for(tmp_path: Path) -> None:
    with Lab(Shape(tp=1)) as first:
        first.wait_ready()
        with watching(tmp_path, "--port", first.port, "--keep", 1) as watch:
            assert watch.wait_for("watching")["generation"] == 1
            first.kill_all()
            watch.wait_for("ended")
            watch.wait_for("waiting")
            with Lab(Shape(tp=1), port=first.port) as second:
                second.wait_ready()
                again = watch.wait_for("watching", 2)
                assert (again["generation"], again["port"]) == (2, first.port)
                assert again["pid"] == second.root
                assert watch.end() == ExitCode.OK
            assert len(watch.bundles()) <= 1


def test_a_new_server_is_watched_while_orphans_of_the_old_one_live_on(tmp_path: Path) -> None:
    with Lab(Shape(tp=2)) as first:
        first.wait_ready()
        with watching(tmp_path, "--port", first.port) as watch:
            watch.wait_for("watching")
            orphan = stop(first, "Worker_TP1")  # what is stopped does not end with its parent
            os.kill(first.root, signal.SIGKILL)
            watch.wait_for("died")
            with Lab(Shape(tp=1), port=first.port) as second:
                second.wait_ready()
                assert watch.wait_for("watching", 2)["pid"] == second.root
            assert watch.end() == ExitCode.OK
        assert orphan in first.processes()


def test_bundles_beyond_the_number_to_keep_go_oldest_first(lab: Lab, tmp_path: Path) -> None:
    strange = tmp_path / "vllmdiag-mine.tar.gz"
    strange.touch()
    with watching(tmp_path, lab.root, "--stall", 1, "--keep", 2) as watch:
        paths = []
        for n in range(1, 4):
            os.kill(lab.pid("Worker_TP1"), signal.SIGSTOP)
            paths.append(Path(watch.wait_for("captured", n)["bundle"]))
            os.kill(lab.pid("Worker_TP1"), signal.SIGCONT)
            watch.wait_for("recovered", n)
        assert watch.end() == ExitCode.OK
        assert watch.bundles() == sorted(paths)[1:]
    assert strange.exists()


def test_ctrl_c_ends_it_with_130_and_a_whole_recording(lab: Lab, tmp_path: Path) -> None:
    with watching(tmp_path, lab.root, "--record", tmp_path / "rec", "--status", 1) as watch:
        watch.wait_for("status")
        assert watch.end(signal.SIGINT) == ExitCode.INTERRUPTED
    assert not read_recording(tmp_path / "rec").cut


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((os.getpid(),), ExitCode.NO_TARGET),
        (("--bundles", "/no/such/directory"), ExitCode.USAGE),
        (("--record", "/no/such/directory/file"), ExitCode.USAGE),
        (("--from", "file"), ExitCode.USAGE),
    ],
)
def test_what_cannot_be_watched_is_told(args: tuple[object, ...], code: ExitCode) -> None:
    done = subprocess.run([*COMMAND, "watch", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""


# --- the terminal

ENTER, LEAVE, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@contextmanager
def terminal(*args: object, columns: int = 100, rows: int = 40, **env: str) -> Iterator[pexpect.spawn[str]]:
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = pexpect.spawn(
        COMMAND[0],
        [*COMMAND[1:], *map(str, args)],
        dimensions=(rows, columns),
        env={**clean, "TERM": "xterm", **env},
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    try:
        yield child
    finally:
        child.close(force=True)


def picture(child: pexpect.spawn[str]) -> list[str]:
    """The rows of one picture."""
    child.expect_exact("\x1b[H")
    child.expect_exact("\x1b[J")
    assert child.before is not None
    return [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in child.before.split("\r\n")]


def until(child: pexpect.spawn[str], condition: Callable[[list[str]], bool]) -> list[str]:
    """The first picture of which that holds."""
    for _ in range(60):
        rows = picture(child)
        if condition(rows):
            return rows
    raise AssertionError(rows)


def test_the_terminal_shows_ranks_and_rings_follows_its_size_and_is_left_as_it_was(lab: Lab, tmp_path: Path) -> None:
    with terminal("watch", lab.root, "--bundles", tmp_path) as child:
        child.expect_exact(ENTER)
        rows = until(child, lambda rows: any("broadcast ring" in row for row in rows))
        assert any(row.split()[:1] == ["Worker_TP1"] for row in rows)
        assert any("nothing has moved" in row or "moving" in row for row in rows)
        assert all(len(row) <= 100 for row in rows)
        child.setwinsize(12, 50)
        rows = until(child, lambda rows: all(len(row) <= 50 for row in rows))
        assert len(rows) <= 12
        child.sendintr()
        child.expect_exact(CURSOR)
        child.expect_exact(LEAVE)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == ExitCode.INTERRUPTED


def test_a_stall_is_shown_and_colour_is_never_alone(lab: Lab, tmp_path: Path) -> None:
    with terminal("watch", lab.root, "--bundles", tmp_path, "--stall", 1, "--ascii", NO_COLOR="1") as child:
        child.expect_exact(ENTER)
        stop(lab, "Worker_TP1")
        child.expect_exact("process-stopped")
        rows = until(child, lambda rows: any("captured" in row for row in rows))
        assert all(row.isascii() for row in rows)
        child.expect_exact("\x1b[H")
        assert not re.search(r"\x1b\[[0-9;]+m", child.before or "")
        child.kill(signal.SIGTERM)
        child.expect_exact(LEAVE)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == ExitCode.OK


def test_a_pipe_gets_a_line_for_each_event_and_no_escape(lab: Lab, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "watch", str(lab.root), "--bundles", str(tmp_path), "--status", "1"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
        rest = process.stdout.read()
        assert process.wait(20) == ExitCode.OK
    assert "watching" in lines[0]
    assert "status" in lines[1]
    assert "stopped" in rest
    assert "\x1b" not in "".join(lines) + rest


def test_a_recording_is_played_again_stepped_and_summed_up(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "rec"
    with watching(tmp_path, lab.root, "--record", file, "--status", 1) as watch:
        watch.wait_for("watching")
        lab.request(30).result()
        watch.wait_for("status", 2)
        watch.end()
    done = subprocess.run([*COMMAND, "replay", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("1 server\n")
    assert "broadcast ring" in done.stdout
    one = subprocess.run([*COMMAND, "replay", str(file), "--at", "1"], capture_output=True, text=True, check=False)
    assert "Worker_TP1" in one.stdout
    with terminal("replay", file, "--speed", "0.01") as child:
        child.expect_exact(ENTER)
        first = picture(child)[0]
        child.send("\x1b[C")
        until(child, lambda rows: rows[0] != first and "1.0 s of" in rows[0])
        child.send("q")
        child.expect_exact(LEAVE)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == ExitCode.OK

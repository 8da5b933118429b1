"""Lines that are appended to a log while it is watched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllmdiag.model.process import Process
from vllmdiag.sources.log_follow import LogFollower

KNOWN = "INFO No available shared memory broadcast block found in {} seconds.\n"


def seconds(follower: LogFollower) -> list[str]:
    return [line.text.split()[-2] for line in follower.lines()]


def test_only_what_comes_after_the_beginning_is_told_and_only_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(KNOWN.format(1))
    follower = LogFollower(paths=[str(log)])
    assert seconds(follower) == []
    with log.open("a") as file:
        file.write(KNOWN.format(2) + "a prompt that nobody may keep\n")
    assert seconds(follower) == ["2"]
    assert seconds(follower) == []


def test_a_line_that_is_still_being_written_is_told_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    follower = LogFollower(paths=[str(log)])
    text = KNOWN.format(60)
    with log.open("a") as file:
        file.write(text[:30])
        file.flush()
        assert seconds(follower) == []
        file.write(text[30:])
    assert seconds(follower) == ["60"]


def test_a_log_that_was_emptied_or_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 1000 + "\n")
    follower = LogFollower(paths=[str(log)])
    log.write_text(KNOWN.format(5))
    assert seconds(follower) == ["5"]
    other = tmp_path / "other"
    other.write_text(KNOWN.format(6))
    os.replace(other, log)
    assert seconds(follower) == ["6"]


def test_a_log_that_is_gone_is_no_error_and_one_that_is_huge_is_read_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    follower = LogFollower(paths=[str(log), str(tmp_path / "none"), str(tmp_path)])
    with log.open("a") as file:
        file.write(KNOWN.format(7) + "y" * (1 << 20) + "\n" + KNOWN.format(8))
    assert seconds(follower) == ["8"]
    log.unlink()
    assert seconds(follower) == []


def test_the_log_is_found_where_a_process_writes_it_and_read_once_for_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        writer = subprocess.Popen(
            [sys.executable, "-c", f"input(); print({KNOWN.format(9)!r}, end='', flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
        )
    assert writer.stdin is not None
    follower = LogFollower([Process(pid=writer.pid)])
    writer.stdin.write(b"\n")
    writer.stdin.flush()
    found: list[str] = []
    while not found:
        found = seconds(follower)
    writer.communicate(b"\n")
    assert found == ["9"]

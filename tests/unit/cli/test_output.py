from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from vllmdiag.cli.output import Output, progress
from vllmdiag.model.errors import NotPermittedError, UsageError


@pytest.fixture(autouse=True)
def _usual_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


@contextmanager
def _on_a_terminal() -> Iterator[None]:
    """Put stdout on a real terminal."""
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as out, redirect_stdout(out):
            yield
    finally:
        os.close(master)


def _pipe(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def test_a_terminal_gets_colour_and_its_width() -> None:
    with _on_a_terminal():
        assert (Output().style.colour, Output().style.width) == (True, 100)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_can_switch_colour_off_and_the_option_rules(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with _on_a_terminal():
        assert not Output().style.colour
        assert Output(color="always").style.colour


def test_colour_can_be_refused_on_a_terminal() -> None:
    with _on_a_terminal():
        assert not Output(color="never").style.colour


def test_a_file_gets_neither_colour_nor_width(tmp_path: Path) -> None:
    with _on_a_terminal():
        style = Output(file=tmp_path / "out.txt").style
    assert (style.colour, style.width, style.ascii) == (False, None, False)


def test_a_pipe_gets_neither_colour_nor_width() -> None:
    with redirect_stdout(_pipe()):
        assert (Output().style.colour, Output().style.width) == (False, None)


@pytest.mark.parametrize(("encoding", "ascii_only"), [("utf-8", False), ("ascii", True), ("latin-1", True)])
def test_a_stream_that_cannot_speak_unicode_gets_ascii(encoding: str, ascii_only: bool) -> None:
    with redirect_stdout(_pipe(encoding)):
        assert Output().style.ascii == ascii_only


def test_the_whole_product_is_written_at_once() -> None:
    out = _pipe()
    with redirect_stdout(out):
        Output().write("a \u2192 b\n")
    assert out.buffer.getvalue().decode() == "a \u2192 b\n"  # type: ignore[attr-defined]


def test_a_file_that_may_not_be_written_is_told() -> None:
    # Neither root nor any other user may create a file in /proc.
    with pytest.raises((NotPermittedError, UsageError), match="cannot write /proc/verdict"):
        Output(file=Path("/proc/verdict")).write("x")


def test_progress_is_silent_off_a_terminal_and_spoken_with_v(capsys: pytest.CaptureFixture[str]) -> None:
    progress(0)("reading stacks")
    assert capsys.readouterr().err == ""
    say = progress(1)
    say("reading stacks")
    say("")
    assert capsys.readouterr() == ("", "vllmdiag: reading stacks\n")


def test_progress_on_a_terminal_is_one_line_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    say = progress(0)
    say("reading stacks")
    say("")
    assert screen.getvalue().count("\n") == 0
    assert screen.getvalue().endswith("\r\x1b[K")

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllmdiag import __version__
from vllmdiag.cli import app
from vllmdiag.cli.main import main
from vllmdiag.model import errors
from vllmdiag.model.errors import ExitCode, VllmdiagError
from vllmdiag.render.document import DOCUMENTS

ERRORS = [
    (errors.UsageError, 64),
    (errors.BadDataError, 65),
    (errors.TargetError, 66),
    (errors.HelperMissingError, 69),
    (errors.TimedOutError, 75),
    (errors.NotPermittedError, 77),
]


def _vllmdiag(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as users start it."""
    return subprocess.run(
        [sys.executable, "-m", "vllmdiag", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TERM": "xterm", **env},
    )


def _raise_in_schema(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run() -> int:
        raise error

    monkeypatch.setattr("vllmdiag.cli.verbs.schema.run", run)


@pytest.mark.parametrize("args", [["--version"], ["--ascii", "--version"]])
def test_the_version_stands_alone_in_the_first_line_and_those_of_the_documents_in_the_second(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == ExitCode.OK
    documents = (identity.removeprefix("vllmdiag.") for identity, _ in DOCUMENTS.values())
    assert capsys.readouterr().out == f"vllmdiag {__version__}\nschemas: {' '.join(documents)}\n"


def test_nothing_asked_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(verb in out for verb in app.VERBS)


@pytest.mark.parametrize("verb", app.VERBS)
def test_the_help_of_every_verb_has_examples_that_name_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert app.VERBS[verb].split()[0] in out
    assert f"  vllmdiag {verb}" in out.partition("Examples:")[2]


@pytest.mark.parametrize(
    "args",
    [
        ["nosuchverb"],
        ["ps", "--nosuchoption"],
        ["ps", "notapid"],
        ["ps", "0"],
        ["ps", "--port", "70000"],
        ["ps", "--window", "soon"],
        ["ps", "--format", "xml"],
        ["ps", "1", "2"],
        ["--color", "blue", "ps"],
        ["schema", "nosuchdocument"],
    ],
)
def test_a_wrong_command_line_is_64_and_says_what_why_next(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert [line[:7] for line in said.err.splitlines()] == ["error: ", "  why: ", "  next:"]


def test_a_mistyped_verb_is_answered_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnos"])
    assert "'diagnose'" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_every_error_has_its_exit_code_and_teaches(
    error: type[VllmdiagError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _raise_in_schema(monkeypatch, error("cannot do it", why="because", next="this\nor that"))
    assert main(["schema"]) == code
    assert capsys.readouterr().err == "error: cannot do it\n  why:  because\n  next: this\n        or that\n"


def test_a_bug_is_70_with_its_place_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLMDIAG_DEBUG", raising=False)
    _raise_in_schema(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["schema"]) == 70
    err = capsys.readouterr().err
    assert "bug in vllmdiag" in err
    assert "ZeroDivisionError at test_main.py:" in err
    assert "Traceback" not in err


def test_a_bug_shows_its_traceback_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLMDIAG_DEBUG", "1")
    _raise_in_schema(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["schema"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130_and_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _raise_in_schema(monkeypatch, KeyboardInterrupt())
    assert main(["schema"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("args", [["schema", "diagnosis"], ["--help"], ["--version"]])
def test_a_reader_that_has_gone_is_no_error(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllmdiag", *args], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_product_goes_to_the_file_and_nothing_to_stdout(tmp_path: Path) -> None:
    here = _vllmdiag("schema", "diagnosis")
    there = _vllmdiag("schema", "diagnosis", "--output", str(tmp_path / "schema.json"))
    assert (there.returncode, there.stdout) == (0, "")
    assert (tmp_path / "schema.json").read_text() == here.stdout


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    done = _vllmdiag("schema", "diagnosis", "--output", str(tmp_path / "nosuch" / "schema.json"))
    assert done.returncode == 64
    assert "No such file or directory" in done.stderr


def test_a_verb_of_two_words_is_one_verb() -> None:
    assert "--yes" in _vllmdiag("shm", "clean", "--help").stdout
    assert "--yes" not in _vllmdiag("shm", "--help").stdout


def test_every_verb_has_its_module_and_every_module_its_verb() -> None:
    modules = {path.stem for path in Path(app.__file__).with_name("verbs").glob("*.py")} - {"__init__"}
    assert modules == {verb.replace(" ", "_") for verb in app.VERBS}

"""Completion: what the program proposes is what it takes, and real shells show it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmdiag.catalogue.entries import catalogue
from vllmdiag.cli import surface
from vllmdiag.cli.app import VERBS
from vllmdiag.cli.completion import VALUES, candidates
from vllmdiag.cli.main import main
from vllmdiag.lab.faults import faults

PATH = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))


def _words(*line: str) -> list[str]:
    return [candidate.word for candidate in candidates(line)]


@pytest.fixture
def engine() -> Iterator[int]:
    """A process that bears the title of an engine."""
    with subprocess.Popen(["VLLM::EngineCore"], executable="/bin/cat", stdin=subprocess.PIPE) as process:
        yield process.pid


def test_every_verb_can_be_reached_by_completing_word_after_word() -> None:
    firsts = _words("")
    assert firsts == list(dict.fromkeys(verb.split()[0] for verb in VERBS))
    for verb in VERBS:
        first, _, second = verb.partition(" ")
        assert not second or second in _words(first, "")


@pytest.mark.parametrize("name", VERBS)
def test_every_option_of_a_verb_is_proposed_and_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    proposed = _words(*name.split(), "-")
    main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert [flag for flag in proposed if flag not in text] == []
    assert all(set(option.flags) & set(proposed) for option in surface.verb(name).options)


def test_an_option_that_stands_there_is_not_proposed_again() -> None:
    assert "--ascii" not in _words("diagnose", "--ascii", "--")
    assert "--verbose" in _words("diagnose", "--verbose", "--")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (("diagnose", "--format", ""), "json"),
        (("diagnose", "--format=j"), "--format=json"),
        (("diagnose", "--format", "=", "j"), "json"),
        (("--color", ""), "never"),
        (("--color", "never", "dia"), "diagnose"),
        (("schema", ""), "diagnosis"),
        (("shm", ""), "clean"),
        (("lab", "experiment", ""), "backpressure"),
        (("lab", "up", "--fault", ""), "worker-stopped"),
        (("playbook", "show", "wor"), "worker-dead"),
        (("explain", ""), "slow-joiner"),
        (("completion", ""), "fish"),
        (("check", "--ignore", "wor"), "worker-dead"),
        (("capture", "--no"), "--no-redact"),
    ],
)
def test_values_are_proposed_where_they_are_wanted(line: tuple[str, ...], word: str) -> None:
    assert word in _words(*line)


def test_all_causes_and_all_faults_are_proposed() -> None:
    assert set(_words("explain", "")) >= set(catalogue())
    assert _words("lab", "run", "") == list(faults())


@pytest.mark.parametrize("line", [("nosuch", ""), ("lab", "nosuch", "x", ""), ("schema", "view", ""), ("ps", "-o", "")])
def test_where_nothing_of_ours_fits_nothing_is_proposed(line: tuple[str, ...]) -> None:
    assert _words(*line) == []


def test_every_kind_of_value_is_wanted_by_some_verb() -> None:
    metavars = {part for name in VERBS for p in surface.verb(name).parameters for part in p.metavar.split("|")}
    assert {kind for kind in VALUES if not any(kind in metavar for metavar in metavars)} <= {"PID"}


def test_a_pid_is_proposed_with_its_part(engine: int) -> None:
    notes = {candidate.word: candidate.note for candidate in candidates(("diagnose", ""))}
    assert notes[str(engine)].startswith("EngineCore")


def test_a_shell_that_asks_is_never_answered_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLMDIAG_COMPLETE", "1")
    monkeypatch.setattr("vllmdiag.cli.surface.verb", lambda name: 1 / 0)
    assert main(["diagnose", ""]) == 0
    assert capsys.readouterr() == ("", "")


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEGIN = {
    "bash": "bind 'set enable-bracketed-paste off'; source <(vllmdiag completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; unsetopt zle_bracketed_paste; source <(vllmdiag completion zsh)",
    "fish": "vllmdiag completion fish | source",
}


class Terminal:
    """An interactive shell, and what its screen has shown."""

    def __init__(self, shell: str, home: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(home)
            env = {"HOME": str(home), "PATH": PATH, "TERM": "dumb" if shell != "fish" else "xterm", "LANG": "C.UTF-8"}
            os.execvpe(SHELLS[shell][0], SHELLS[shell], env)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 40) -> None:
        """Read until the text is on the screen; what came before it is forgotten."""
        end = time.monotonic() + seconds
        while text not in self.screen:
            if not select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} is not in {self.screen!r}")
            data = os.read(self.fd, 1 << 16)
            if data.find(b"\x1b[c") >= 0 or data.find(b"\x1b[0c") >= 0:
                self.type("\x1b[?1;2c")  # fish asks what kind of terminal this is
            self.screen += data.decode(errors="replace")
        self.screen = self.screen.partition(text)[2]

    def close(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.mark.parametrize("shell", [pytest.param(name, marks=pytest.mark.needs(name)) for name in SHELLS])
def test_a_real_shell_completes(shell: str, tmp_path: Path, engine: int) -> None:
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type(f"{BEGIN[shell]}; echo re''ady\n")
        terminal.wait_for("ready")
        terminal.type("vllmdiag explain process-st\t --asc\t")
        terminal.wait_for("process-stopped")
        terminal.wait_for("--ascii")
        terminal.type(f"\x15vllmdiag ps {str(engine)[:-1]}\t\t")
        terminal.wait_for(str(engine))
        terminal.type("\x15vllmdiag lab \t\t")
        terminal.wait_for("experiment")
    finally:
        terminal.close()

"""Command lines of vllmdiag that stand in a text, and whether the real command line understands them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import typer

from vllmdiag.catalogue.playbooks import PLACEHOLDERS, fill
from vllmdiag.cli.app import build
from vllmdiag.render.markdown import commands

NUMBERS = {name: "8000" if name == "port" else "2839" for name in PLACEHOLDERS}

_STAND_FOR = {"PID": "2839", "TARGET": "2839", "PORT": "8000", "VERB": "diagnose", "CAUSE": "idle", "FAULT": "idle"}


def stages(command: str) -> Iterator[list[str]]:
    """The programs of a pipeline with their arguments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True  # an address with its port is one word
    stage: list[str] = []
    for word in lexer:
        if word and set(word) <= set("|<>;&"):
            yield stage
            stage = []
        else:
            stage.append(word)
    yield stage


def calls_in(line: str) -> list[list[str]]:
    """Arguments of the calls of vllmdiag in one command line; what stands in capitals for a value is given one."""
    return [[_STAND_FOR.get(word, word) for word in stage[1:]] for stage in stages(line) if stage[:1] == ["vllmdiag"]]


def own_commands(text: str) -> list[list[str]]:
    """Arguments of every call of vllmdiag in Markdown: in blocks of code, fenced or indented, and in a line."""
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"^ {4}(?:\$ )?(vllmdiag .*)$", without_blocks, re.MULTILINE)
    inline = re.findall(r"`(vllmdiag [^`]+)`", re.sub(r"\s+", " ", without_blocks))
    return [args for line in (*commands(text), *indented, *inline) for args in calls_in(fill(line, NUMBERS))]


def parse(args: list[str]) -> None:
    """Let the real command line understand the arguments, without running the verb.

    Raises:
        TyperException: it does not.
    """
    app, words = build(args)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with group.make_context("vllmdiag", list(words)) as context:
        if not (verb := [*context._protected_args, *context.args]):
            return  # an option of vllmdiag itself
        name, command, rest = group.resolve_command(context, verb)
        assert command is not None
        try:
            with command.make_context(name, list(rest), parent=context):
                pass
        except typer.Exit:
            assert "--help" in rest

"""`vllmdiag fleet node`: the answer of one node, for `fleet diagnose` to read."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllmdiag.cli.output import silence_stdout
from vllmdiag.model.errors import ExitCode

EPILOG = """Examples:

\b
  vllmdiag fleet node                   JSON lines of every instance on this node
  vllmdiag fleet node --window 10 > gpu07.jsonl

\b
`fleet diagnose` runs this on every node. It reads as `diagnose` reads; nothing is judged here."""


def run(
    window: Annotated[float, typer.Option(metavar="SECONDS", help="How long to watch.", min=0.2, max=600.0)] = 3.0,
    deadline: Annotated[int, typer.Option(metavar="SECONDS", help="After which to give up.", min=1)] = 120,
) -> int:
    """Write what is seen of every instance on this node."""
    from vllmdiag.fleet.node import answer

    def write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    try:
        answer(window, deadline, write)
    except BrokenPipeError:
        silence_stdout()
    return ExitCode.OK

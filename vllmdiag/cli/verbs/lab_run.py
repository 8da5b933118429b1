"""`vllmdiag lab run`: one fault, live, diagnosed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllmdiag.cli.output import Output, progress
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.verdict import diagnosis_text

EPILOG = """Examples:

\b
  vllmdiag lab run worker-stopped
  vllmdiag lab run lost-wakeup -v
  vllmdiag lab faults                   the faults there are

\b
Exit codes: 0 the diagnosis is the expected one, 1 it is not, 3 this machine cannot show this fault."""


def hint(words: str) -> None:
    """Something worth knowing that is not the product."""
    if words:
        print(f"vllmdiag: {words}", file=sys.stderr)


def run(
    fault: Annotated[str, typer.Argument(metavar="FAULT", help="See `vllmdiag lab faults`.")],
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to watch for motion.", min=0.2, max=600.0)
    ] = 3.0,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say what is done.")
    ] = 0,
) -> int:
    """Start a server, put the fault in, diagnose, say what was expected and what came, clean up."""
    from vllmdiag.lab.faults import named
    from vllmdiag.lab.leftovers import clear_up
    from vllmdiag.lab.verify import run as run_fault

    hint(clear_up())
    chosen = named(fault)
    output = Output(verbose=verbose)
    result = run_fault(chosen, progress(verbose), window_s=window)
    if result.diagnosis is None:
        hint(f"{chosen.name} is left out: it needs {result.skipped}")
        return ExitCode.UNKNOWN
    output.write(f"fault     {chosen.name}: {chosen.does}\n\n")
    output.write(diagnosis_text(result.diagnosis, output.style))
    output.write(f"\nexpected  {chosen.expected}\ngot       {result.got}\n{result.outcome}{_why(result.misses)}\n")
    return ExitCode.WARNING if result.misses else ExitCode.OK


def _why(misses: tuple[str, ...]) -> str:
    return f": {'; '.join(misses)}" if misses else ""

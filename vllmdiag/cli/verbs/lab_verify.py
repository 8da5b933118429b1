"""`vllmdiag lab verify`: every fault, and every healthy state."""

from __future__ import annotations

from typing import Annotated

import typer

from vllmdiag.cli.output import Output, progress
from vllmdiag.cli.verbs.lab_run import hint
from vllmdiag.model.errors import ExitCode

EPILOG = """Examples:

\b
  vllmdiag lab verify                   all of them: some minutes
  vllmdiag lab verify worker-stopped ring-full --times 3
  vllmdiag lab verify --quick           without those that need half a minute each

\b
Exit codes: 0 every diagnosis is the expected one, 1 one is not."""


def run(
    only: Annotated[list[str] | None, typer.Argument(metavar="[FAULT]...", help="Only these.")] = None,
    times: Annotated[int, typer.Option(help="Rounds.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the slow ones.")] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say what is done.")
    ] = 0,
) -> int:
    """Run the faults one after the other; a line for each: outcome, expected, got."""
    from vllmdiag.lab.faults import faults, named
    from vllmdiag.lab.leftovers import clear_up
    from vllmdiag.lab.verify import Run, verify

    hint(clear_up())
    chosen = [named(name) for name in only] if only else list(faults().values())
    chosen = [fault for fault in chosen if not (quick and fault.slow)]
    say, write = progress(verbose), Output().write
    outcomes: dict[str, int] = {}

    def show(run: Run) -> None:
        outcomes[run.outcome] = outcomes.get(run.outcome, 0) + 1
        got = run.got if run.misses else ""
        line = f"{run.outcome:<15} {run.fault.name:<25} {run.fault.expected}"
        more = f"   got {got}" if got else f"   needs {run.skipped}" if run.skipped else ""
        write(f"{line}{more}   {run.wall_s:.0f} s\n" + "".join(f"{'':16}{miss}\n" for miss in run.misses))

    right = verify(chosen, times, say, show)
    write(", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()) + "\n")
    return ExitCode.OK if right else ExitCode.WARNING

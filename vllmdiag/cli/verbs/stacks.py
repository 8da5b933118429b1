"""`vllmdiag stacks`: Python stacks."""

from __future__ import annotations

from typing import Annotated

import typer

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.stacks import merged_text, stacks_text

EPILOG = """Examples:

\b
  vllmdiag stacks                       the only instance on this host
  vllmdiag stacks 2839 --window 10      dumps spread over ten seconds
  vllmdiag stacks -v                    all frames of all threads
  vllmdiag stacks --merge               one tree of all ranks: where they part, and who is alone

\b
Taken by py-spy without stopping the processes: a stack that moves may be torn."""


def run(
    common: Common,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="One tree of frames over all ranks, outermost first; who parts is named."),
    ] = False,
) -> int:
    """Show the Python stacks, equal ones folded."""
    seen = instance_view(common, "stacks")
    if not merge:
        return show(common, seen, ("stacks",), stacks_text)
    from vllmdiag.diagnosis.merged_stacks import merged
    from vllmdiag.render.document import to_json

    trees = merged(seen, every_thread=common.output.verbose > 0)
    if common.format is Format.JSON:
        common.output.write(to_json(trees))
    else:
        common.output.write(merged_text(trees, common.output.style))
    return ExitCode.OK if trees.threads or not seen.missing else ExitCode.UNKNOWN

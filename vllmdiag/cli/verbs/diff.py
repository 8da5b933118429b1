"""`vllmdiag diff`: two bundles compared, rank by rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vllmdiag.cli.options import Ascii, Color, Destination, Format, output_of
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.render.diff import diff_text
from vllmdiag.render.document import to_json

if TYPE_CHECKING:
    from vllmdiag.bundle.diff import Look

EPILOG = """Examples:

\b
  vllmdiag diff before.tar.gz after.tar.gz
  vllmdiag diff good.tar.gz bad.tar.gz --format json | jq '.processes[]'
  vllmdiag capture -o - | vllmdiag diff before.tar.gz -

\b
Processes are matched by role and rank: what appeared, is gone or was restarted, state, innermost frame,
environment, limits, libraries; rings by their writer; counters, endpoints, devices. What the clock alone
changes is no difference. Exit codes, as those of diff: 0 no difference, 1 differences, 65 no bundle."""


def run(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A bundle or a snapshot; - for stdin.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another one.")],
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Cut nothing.")] = 0,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Show what differs."""
    from vllmdiag.bundle.diff import compare

    if before == after == "-":
        raise UsageError("standard input can be one of the two only", next="vllmdiag diff BEFORE -")
    diff = compare(_look(before), _look(after))
    out = output_of(context, output, color, ascii, verbose)
    out.write(to_json(diff) if format is Format.JSON else diff_text(diff, out.style))
    return ExitCode.WARNING if diff.differs else ExitCode.OK


def _look(file: str) -> Look:
    """The last snapshot of a file; ``-`` is standard input. Raises what `read_bundle` raises."""
    from vllmdiag.bundle.archive import read_bundle
    from vllmdiag.bundle.diff import Look

    bundle = read_bundle(sys.stdin.buffer if file == "-" else file)
    return Look(bundle.snapshot, file, bundle.manifest.redaction.key_id if bundle.manifest is not None else "")

"""`vllmdiag schema`: the JSON Schema of what `--format json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.render.document import DOCUMENTS, json_schema

EPILOG = """Examples:

\b
  vllmdiag schema diagnosis             of `diagnose --format json`
  vllmdiag schema view                  of the verbs that show one layer
  vllmdiag schema instances             of `ps` where the host has several
  vllmdiag schema                       the documents there are"""


def run(
    document: Annotated[str | None, typer.Argument(metavar="DOCUMENT", help=", ".join(DOCUMENTS))] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there.")] = None,
) -> int:
    """Print a schema, or the names of the documents."""
    if document is None:
        Output(file=output).write(
            "".join(f"{name.ljust(13)} {identity}\n" for name, (identity, _) in DOCUMENTS.items())
        )
    elif document in DOCUMENTS:
        Output(file=output).write(json_schema(document))
    else:
        raise UsageError(
            f"no document is called {document}", why=f"there are {', '.join(DOCUMENTS)}", next="vllmdiag schema"
        )
    return ExitCode.OK

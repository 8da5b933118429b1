"""`vllmdiag triage`: pasted evidence in, verdict out."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllmdiag.cli.options import Ascii, Color, Destination, Format, output_of
from vllmdiag.cli.output import progress
from vllmdiag.cli.verbs.diagnose import EXIT
from vllmdiag.model.errors import UsageError
from vllmdiag.render.document import to_json
from vllmdiag.render.verdict import diagnosis_text

EPILOG = """Examples:

\b
  vllmdiag triage bug-report.md
  vllmdiag triage stacks.txt stacks_t1.txt ps.txt metrics_t0.txt metrics_t1.txt vllm.log
  vllmdiag triage ./evidence/ support.tar.gz
  kubectl logs vllm-0 | vllmdiag triage -

\b
Each piece is recognised by its content: dumps of py-spy and pystack, ps, top, ss, netstat, /metrics, curl -v, files of
/proc, df and ls of /dev/shm, ring dumps, ip addr, ray status, nvidia-smi, NCCL RAS, kernel log, vLLM logs; alone, in
archives, or in the code fences of a report. A suffix such as _t1 marks a second look. Nothing is unpacked or run.

\b
Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown, 65 nothing that can be judged, 66 no such file."""


def run(
    context: typer.Context,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH...", help="Files, directories, archives; - for standard input.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more, fold nothing.")
    ] = 0,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Name the first blocker from pasted evidence."""
    from vllmdiag.bundle.triage import triage
    from vllmdiag.diagnosis.judge import diagnose

    if not paths:
        raise UsageError(
            "no evidence was given", next="vllmdiag triage FILE... or, for standard input, vllmdiag triage -"
        )
    out = output_of(context, output, color, ascii, verbose)
    say = progress(verbose)
    try:
        read = triage(paths, sys.stdin.buffer, say)
    finally:
        say("")
    for stretch in read.unknown:
        print(f"vllmdiag: not understood: {stretch.source}:{stretch.number}: {stretch.first[:100]}", file=sys.stderr)
    diagnosis = diagnose(read.snapshot())
    out.write(to_json(diagnosis) if format is Format.JSON else diagnosis_text(diagnosis, out.style))
    return EXIT[diagnosis.verdict.status]

"""`vllmdiag lab faults`: what can be broken."""

from __future__ import annotations

from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.page import Page, Span

EPILOG = """Examples:

\b
  vllmdiag lab faults
  vllmdiag lab run worker-stopped"""


def run() -> int:
    """List the faults, each with what it does and what `diagnose` must say."""
    from vllmdiag.lab.faults import faults

    output = Output()
    page = Page(output.style)
    for fault in faults().values():
        lacking = fault.lacking()
        note = (Span(f"  (needs {lacking})", "warn"),) if lacking else ()
        page.line(Span(fault.name, "head"), "  ", fault.expected, *note)
        page.line(fault.does, indent=2)
    output.write(page.text())
    return ExitCode.OK

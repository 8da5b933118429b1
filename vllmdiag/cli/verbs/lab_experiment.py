"""`vllmdiag lab experiment`: one property, measured."""

from __future__ import annotations

from typing import Annotated

import typer

from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.render.page import Page, Span

EPILOG = """Examples:

\b
  vllmdiag lab experiment               the experiments there are
  vllmdiag lab experiment backpressure
  vllmdiag lab experiment cow

\b
Every number is measured here and now, on this machine."""


def run(name: Annotated[str | None, typer.Argument(metavar="EXPERIMENT", help="Which one.")] = None) -> int:
    """Carry one out, and say what to look at and what was measured."""
    from vllmdiag.lab.experiments import EXPERIMENTS, measure

    output = Output()
    page = Page(output.style)
    if name is None:
        page.table([(Span(key, "head"), summary) for key, summary in EXPERIMENTS.items()])
    elif name not in EXPERIMENTS:
        raise UsageError(
            f"no experiment {name!r}", why=f"there are {', '.join(EXPERIMENTS)}", next="vllmdiag lab experiment"
        )
    else:
        report = measure(name)
        page.line(Span(f"{name}: ", "head"), EXPERIMENTS[name])
        page.line("look at   ", report.look_at, hang=10)
        page.section("measured")
        page.table(report.rows, indent=2)
        page.gap()
        page.line("so        ", report.learned, hang=10)
    output.write(page.text())
    return ExitCode.OK

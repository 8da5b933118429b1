"""`vllmdiag report`: the diagnosis as one page for a browser."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllmdiag import __version__
from vllmdiag.cli.look import snapshot
from vllmdiag.cli.options import Common
from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode, TargetError, UsageError
from vllmdiag.model.report import LagTrace, Report
from vllmdiag.model.snapshot import Snapshot

EPILOG = """Examples:

\b
  vllmdiag report -o report.html                     the only instance on this host
  vllmdiag report 2839 -o report.html --window 10
  vllmdiag report incident.tar.gz -o report.html     a bundle of `vllmdiag capture`, or the JSON of a snapshot
  vllmdiag report incident.tar.gz --recording night.rec -o report.html
  vllmdiag report night.rec -o -                     the rings of `vllmdiag watch --record` alone

\b
One file: no script, nothing loaded from elsewhere. It shows what was seen, process titles and paths included; made
from a bundle, it is as redacted as the bundle. Exit code 0 when the page was written, whatever it says."""


def run(
    what: Annotated[
        str | None, typer.Argument(metavar="[TARGET|FILE]", help="Any pid of the instance, or a file; - is stdin.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="HTTP port of the instance.", min=1, max=65535)
    ] = None,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to watch a live instance.", min=0.2, max=600.0)
    ] = 3.0,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw this recording of `watch --record` too.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there; - is standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say what is being done.")
    ] = 0,
) -> int:
    """Write the page."""
    destination = _destination(output, force=force)
    report = _report(what, port, window, verbose)
    if recording is not None:
        report = msgspec.structs.replace(report, traces=(*report.traces, *_traces(recording)))

    from vllmdiag.render.html import report_html

    destination.write(report_html(report, __version__))
    return ExitCode.OK


def _destination(output: Path | None, *, force: bool) -> Output:
    """Where to write, known before anything is looked at."""
    if output is None and sys.stdout.isatty():
        raise UsageError("a page of HTML is nothing for a terminal", next="-o report.html")
    if output is None or str(output) == "-":
        return Output()
    if output.exists() and not force:
        raise UsageError(f"{output} is there already", next=f"--force, or another name than {output}")
    return Output(file=output)


def _report(what: str | None, port: int | None, window: float, verbose: int) -> Report:
    """Everything to draw of a live instance or of a file."""
    from vllmdiag.diagnosis.report import report_of

    if what is None or what.isdecimal():
        target = int(what) if what is not None else None
        common = Common(target=target, port=port, window_s=window, output=Output(verbose=verbose))
        return report_of(snapshot(common, "diagnose"))
    if port is not None:
        raise UsageError("--port is for a live instance, and a file was named", next="leave one of them out")
    if what != "-" and not Path(what).exists():
        raise TargetError(f"there is no file {what}", why="TARGET is a pid; all else is a file", next="vllmdiag ps")
    if what != "-" and _is_recording(Path(what)):
        return Report(traces=_traces(Path(what)))
    return report_of(_snapshot_of(what))


def _snapshot_of(what: str) -> Snapshot:
    from vllmdiag.bundle.archive import read_bundle

    return read_bundle(sys.stdin.buffer if what == "-" else what).snapshot


def _is_recording(path: Path) -> bool:
    """Whether a file is one of `watch --record`: packed lines, and the first says so."""
    from vllmdiag.model.recording import RECORDING_SCHEMA

    family = RECORDING_SCHEMA.partition("/")[0].encode()
    try:
        with gzip.open(path, "rb") as file:
            return family in file.read(200)
    except (OSError, EOFError, zlib.error):
        return False


def _traces(path: Path) -> tuple[LagTrace, ...]:
    from vllmdiag.diagnosis.report import recorded_traces
    from vllmdiag.watch.recording import read_recording

    return recorded_traces(read_recording(path), path.name)

"""`vllmdiag fleet diagnose`: one verdict over many nodes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllmdiag import __version__
from vllmdiag.cli.options import Ascii, Color, Destination, Format, output_of
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.model.fleet import NodeReport
from vllmdiag.render.document import to_json

EPILOG = """Examples:

\b
  vllmdiag fleet diagnose --engine ssh --nodes 'gpu[01-48]'
  vllmdiag fleet diagnose --engine ssh --nodes a,b --ssh-option=-p2222 --ship vllmdiag.pyz
  vllmdiag fleet diagnose --engine kubectl --selector app=vllm --namespace serving
  vllmdiag fleet diagnose --engine slurm --job 4711
  vllmdiag fleet diagnose --engine ray --ray-python /opt/vllm/bin/python
  vllmdiag fleet diagnose --engine files bundles/*.tar.gz

\b
Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown: a node gave no answer and nothing else was found.
Every node is asked at the same time, each with its deadline. One that hangs, refuses, answers garbage or runs another
version of vllmdiag is named; the rest is judged. Read-only, as `diagnose`. What --ship sends stays in memory
there; its compiled parts go to the cache of that user, once."""

_EXIT = {
    "ok": ExitCode.OK,
    "warning": ExitCode.WARNING,
    "critical": ExitCode.CRITICAL,
    "unknown": ExitCode.UNKNOWN,
}


class Engine(str, Enum):
    """How nodes are reached."""

    RAY = "ray"
    SSH = "ssh"
    KUBECTL = "kubectl"
    SLURM = "slurm"
    FILES = "files"


def run(
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Bundles, or directories of them.")
    ] = None,
    engine: Annotated[Engine | None, typer.Option(help="How the nodes are reached.", show_default="files")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="NODESET", help="ssh: a,b or 'gpu[01-48]' or @group.")] = None,
    ssh_option: Annotated[list[str] | None, typer.Option(metavar="OPTION", help="ssh: passed on, e.g. -p2222.")] = None,
    selector: Annotated[str | None, typer.Option("--selector", "-l", help="kubectl: labels of the pods.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="kubectl.")] = None,
    container: Annotated[str | None, typer.Option("--container", "-c", help="kubectl: of several in a pod.")] = None,
    kube_context: Annotated[str | None, typer.Option("--kube-context", help="kubectl: which cluster.")] = None,
    job: Annotated[str | None, typer.Option(metavar="ID", help="slurm: else the job that this shell is in.")] = None,
    ray_address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="ray: else the cluster of here.")] = None,
    ray_python: Annotated[Path | None, typer.Option(metavar="FILE", help="ray: the Python that has it.")] = None,
    window: Annotated[float, typer.Option(metavar="SECONDS", help="How long to watch.", min=0.2, max=600.0)] = 3.0,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="For each node.", min=1.0)] = 30.0,
    at_once: Annotated[int, typer.Option(metavar="N", help="Nodes asked at a time.", min=1, max=1024)] = 64,
    ship: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Send this vllmdiag.pyz; there it unpacks into the cache of its user."),
    ] = None,
    remote_command: Annotated[
        str, typer.Option(metavar="COMMAND", help="How vllmdiag is called there; with --ship, Python.")
    ] = "vllmdiag",
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more.")] = 0,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Ask every node, and judge all answers together."""
    from vllmdiag.fleet.command import far_end
    from vllmdiag.fleet.judge import judge
    from vllmdiag.render.fleet import fleet_text

    out = output_of(context, output, color, ascii, verbose)
    how = engine or (Engine.FILES if files else None)
    if how is None:
        raise UsageError("no engine is named", why="there is nobody to ask", next="--engine ssh --nodes a,b")
    if files and how is not Engine.FILES:
        raise UsageError(f"--engine {how.value} reads no files", why=str(files[0]), next="--engine files FILE...")
    done = _progress(verbose)
    reports: Sequence[NodeReport]
    if how is Engine.FILES:
        from vllmdiag.fleet.engines.files import read_files

        if not files:
            raise UsageError("no files are named", why="the engine files reads bundles", next="... files/*.tar.gz")
        reports = read_files(files, done)
    elif window + 1 > deadline:
        raise UsageError(f"nobody can answer within {deadline:g} s", why=f"they watch {window:g} s", next="--deadline")
    else:
        far = far_end(window, deadline, tuple(shlex.split(remote_command)), ship)
        if how is Engine.RAY:
            from vllmdiag.fleet.engines.ray import ask_ray

            reports = ask_ray(ray_address, far, deadline, at_once, done, ray_python)
        else:
            from vllmdiag.fleet.ask import ask
            from vllmdiag.fleet.engines.shells import kubectl, slurm, ssh

            if how is Engine.SSH:
                errands = ssh(_needed(nodes, "--nodes NODESET"), far, ssh_option or (), min(10.0, deadline))
            elif how is Engine.KUBECTL:
                errands = kubectl(_needed(selector, "--selector LABELS"), far, namespace, container, kube_context)
            else:
                errands = slurm(far, job)
            reports = ask(errands, deadline, at_once, done)
    fleet = judge(reports, how.value, __version__)
    out.write(to_json(fleet) if format is Format.JSON else fleet_text(fleet, out.style))
    return _EXIT[fleet.verdict.status]


def _needed(value: str | None, option: str) -> str:
    if value is None:
        raise UsageError("which nodes is not said", why="this engine does not know them by itself", next=option)
    return value


def _progress(verbose: int) -> Callable[[NodeReport], None]:
    """A line on stderr for each node as it answers: on a terminal or with -v all, else those that gave no answer."""
    every = verbose or sys.stderr.isatty()
    count = 0

    def done(report: NodeReport) -> None:
        nonlocal count
        count += 1
        if every or report.outcome not in ("answered", "empty"):
            words = f": {report.problem}" if report.problem else ""
            print(f"vllmdiag: {count} {report.node} {report.outcome} in {report.took_s:.1f} s{words}", file=sys.stderr)

    return done

"""`vllmdiag plan`: capacity before the start, and a live node against its plan."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllmdiag.cli.options import Ascii, Color, Destination, Format, output_of
from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.model.plan import Plan, Topology
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.plan.host import Limits
from vllmdiag.render.document import to_json
from vllmdiag.vllm.serve_options import ServeOptions

EPILOG = """Examples:

\b
  vllmdiag plan --nodes 48 --gpus-per-node 8 --tp 8
  vllmdiag plan --nodes 16 --tp 8 --dp 16 --ep --limit shm=1g --limit nofile=4096
  vllmdiag plan --serve "vllm serve m -tp 8 -pp 2 --nnodes 2"
  vllmdiag plan --config vllm.yaml --host-limits
  vllmdiag plan --from 2839             what the live server of that pid should hold
  vllmdiag plan --check 2839            and whether it does

\b
Exit codes: 0 planned, or the live node agrees; 1 it differs; 3 nothing of it was observed; 64 it cannot be started.
With --check processes, rings, their bytes and unix sockets must be equal; descriptors of a process may be 35 % more,
threads 50 %; those of workers are not compared, because devices add to them.
Limits: shm, nofile, pids, sun_path, ports, backlog, identities."""


class Executor(str, Enum):
    """How an engine runs its ranks."""

    MP = "mp"
    RAY = "ray"
    UNI = "uni"


def run(
    context: typer.Context,
    nodes: Annotated[int | None, typer.Option(help="Machines.", min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each.", min=1, show_default="8")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline-parallel size.", min=1)] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size: engines of one server.", min=1)] = None,
    dp_local: Annotated[int | None, typer.Option(help="Engines on one node.", min=1)] = None,
    ep: Annotated[bool, typer.Option("--ep", help="Expert parallelism.")] = False,
    api_servers: Annotated[int | None, typer.Option(help="API servers; else one for each engine.", min=1)] = None,
    executor: Annotated[Executor | None, typer.Option(help="How ranks are run; uni: one rank in the engine.")] = None,
    vllm_version: Annotated[str | None, typer.Option(help="Of vLLM; else the newest known.")] = None,
    serve: Annotated[str | None, typer.Option(metavar="COMMAND", help="A `vllm serve` command line.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The YAML file of `vllm serve --config`.")] = None,
    source: Annotated[int | None, typer.Option("--from", metavar="TARGET", help="The live server of this pid.")] = None,
    check: Annotated[int | None, typer.Option(metavar="TARGET", help="Compare this live server.")] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Instead of the default.")] = None,
    host_limits: Annotated[bool, typer.Option("--host-limits", help="Those of this machine.")] = False,
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more.")] = 0,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Plan a topology, or hold a live server against its plan."""
    from vllmdiag.plan.asked import options_of, topology_of
    from vllmdiag.plan.host import limits_here
    from vllmdiag.plan.make import plan
    from vllmdiag.render.plan import plan_text

    out = output_of(context, output, color, ascii, verbose)
    target = source or check
    if sum(x is not None for x in (source, check, serve or config)) > 1:
        raise UsageError(
            "only one of --from, --check, --serve and --config", why="each of them says what to plan", next="leave one"
        )
    limits = limits_here() if host_limits else {}
    seen = None
    if target is not None:
        seen, topology, options, theirs = _live(target, verbose)
        limits = {**limits, **theirs}
    elif serve is not None or config is not None:
        topology = topology_of(options_of(serve or "", config), gpus_per_node=gpus_per_node)
    else:
        topology = Topology(gpus_per_node=gpus_per_node or 8)
    said = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "dp_local": dp_local,
        "ep": ep or None,
        "api_servers": api_servers,
        "executor": executor.value if executor else None,
        "version": vllm_version,
    }
    topology = msgspec.structs.replace(topology, **{name: value for name, value in said.items() if value is not None})
    made = plan(topology, {**limits, **dict(_limit(text) for text in limit or ())})
    if seen is not None and check is not None:
        return _check(made, seen, options, out, format)
    out.write(to_json(made) if format is Format.JSON else plan_text(made, out.style))
    return ExitCode.OK


def _live(target: int, verbose: int) -> tuple[Snapshot, Topology, ServeOptions | None, Limits]:
    """What is to be planned of a live server, and the limits it runs under."""
    from vllmdiag.cli.live_plan import topology_of_live
    from vllmdiag.cli.look import snapshot
    from vllmdiag.cli.options import Common
    from vllmdiag.plan.host import limits_of

    seen = snapshot(Common(target=target, window_s=0.5, output=Output(verbose=verbose)), "diagnose")
    scene, topology = topology_of_live(seen)
    return seen, topology, scene.options, limits_of(seen)


def _check(made: Plan, seen: Snapshot, options: ServeOptions | None, out: Output, format: Format) -> int:
    from vllmdiag.diagnosis.view import view
    from vllmdiag.plan.check import check, kind_of
    from vllmdiag.render.plan import check_text

    compared = check(made, kind_of(made, options), view(seen))
    out.write(to_json(compared) if format is Format.JSON else check_text(compared, out.style))
    if all(c.seen is None for c in compared.compared):
        return ExitCode.UNKNOWN
    return ExitCode.OK if compared.agrees else ExitCode.WARNING


_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _limit(text: str) -> tuple[str, tuple[int | None, str]]:
    """``shm=1g`` as a limit."""
    name, equals, value = text.partition("=")
    value = value.strip().lower()
    if value == "unlimited":
        return name, (None, "given")
    unit = _UNITS.get(value[-1:], 0)
    digits = value[:-1] if unit else value
    if not equals or not digits.isdecimal():
        raise UsageError(
            f"--limit {text} is no limit", why="it is not NAME=NUMBER", next="--limit nofile=65536 --limit shm=1g"
        )
    return name, (int(digits) * (unit or 1), "given")

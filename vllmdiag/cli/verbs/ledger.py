"""`vllmdiag ledger`: the copies of a request and of a step; of a live server also where the time goes."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from vllmdiag.cli.look import snapshot
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode
from vllmdiag.model.ledger import Load
from vllmdiag.model.plan import Topology
from vllmdiag.render.document import to_json
from vllmdiag.render.ledger import ledger_text

EPILOG = """Examples:

\b
  vllmdiag ledger --tp 8
  vllmdiag ledger --tp 8 --prompt-tokens 32000 --batch 256
  vllmdiag ledger --tp 4 --tensor-bytes 20000000      an image that does not fit a slot
  vllmdiag ledger 2839 --window 10      of a live server: copies, and where the time goes

\b
Sizes are those recorded from a live server; what is estimated says so with -v. Times are means over the window; a layer
of which nothing is known says why."""


def run(
    common: Common,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline-parallel size.", min=1)] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size.", min=1)] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines.", min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each.", min=1, show_default="8")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of one request.", min=1)] = 1000,
    prompt_bytes: Annotated[int | None, typer.Option(help="Its text; else 4 a token.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Requests in a step.", min=1)] = 1,
    tensor_bytes: Annotated[int, typer.Option(help="One array that comes with the request.", min=0)] = 0,
) -> int:
    """Account for the copies; with TARGET or --port of a live server."""
    from vllmdiag.plan.ledger import ledger

    load = Load(
        prompt_tokens=prompt_tokens,
        prompt_bytes=prompt_bytes or 4 * prompt_tokens,
        batch=batch,
        tensor_bytes=tensor_bytes,
    )
    sizes = {"tp": tp, "pp": pp, "dp": dp, "nodes": nodes, "gpus_per_node": gpus_per_node}
    said = {name: value for name, value in sizes.items() if value is not None}
    if common.target is None and common.port is None:
        account = ledger(msgspec.structs.replace(Topology(), **said), load)
    else:
        from vllmdiag.cli.live_plan import topology_of_live
        from vllmdiag.diagnosis.case import Case
        from vllmdiag.diagnosis.timing import times_of

        seen = snapshot(common, "diagnose")
        scene, topology = topology_of_live(seen)
        times, steps = times_of(Case(scene))
        account = msgspec.structs.replace(
            ledger(msgspec.structs.replace(topology, **said), load),
            times=times,
            steps_seen=steps,
            window_s=seen.window_s,
        )
    as_json = common.format is Format.JSON
    common.output.write(to_json(account) if as_json else ledger_text(account, common.output.style))
    return ExitCode.OK

"""`vllmdiag lab up`: a miniature server to look at."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from vllmdiag.cli.output import Output
from vllmdiag.cli.verbs.lab_run import hint
from vllmdiag.model.errors import ExitCode

EPILOG = """Examples:

\b
  vllmdiag lab up                       one engine, two ranks
  vllmdiag lab up --tp 2 --dp 2
  vllmdiag lab up --tp 2 --nodes 2      the second rank on another loopback address
  vllmdiag lab up --fault worker-stopped --after 10
  vllmdiag lab up --fault worker-stopped --tp 4

\b
It runs until Ctrl-C, and leaves nothing. Look at it from another terminal: vllmdiag diagnose.
No GPU, no torch, no model: processes, threads, sockets and rings as those of a real vLLM."""


def run(
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks [2].", min=1, max=64)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages [1].", min=1, max=16)] = None,
    dp: Annotated[int | None, typer.Option(help="Engines [1].", min=1, max=16)] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, each on its own loopback address [1].", min=1, max=8)
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(metavar="FAULT", help="Put this fault in; it brings its own server, but for what is given here."),
    ] = None,
    after: Annotated[float, typer.Option(metavar="SECONDS", help="... so long after it is ready.", min=0)] = 0.0,
) -> int:
    """Start a server, say what it consists of, and keep it until Ctrl-C."""
    from dataclasses import replace

    from vllmdiag.lab.faults import named
    from vllmdiag.lab.inject import inject
    from vllmdiag.lab.leftovers import clear_up
    from vllmdiag.lab.server import Lab, Shape

    hint(clear_up())
    write = Output().write
    chosen = named(fault) if fault is not None else None
    own = chosen.start() if chosen is not None else Shape()
    shape = replace(own, tp=tp or own.tp, pp=pp or own.pp, dp=dp or own.dp, nodes=nodes or own.nodes)
    with Lab(shape) as lab:
        if chosen is None or chosen.ready:
            lab.wait_ready()
        write(f"{lab.describe()}\nhttp://127.0.0.1:{lab.port}   vllmdiag diagnose {lab.root}   Ctrl-C ends it\n")
        if chosen is not None:
            time.sleep(after)
            write(f"{chosen.name}: {chosen.does}\n")
            inject(lab, chosen)
            write(f"in place; expected: {chosen.expected}\n")
        lab.watch()
    return ExitCode.OK

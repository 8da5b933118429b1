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

\b
It runs until Ctrl-C, and leaves nothing. Look at it from another terminal: vllmdiag diagnose.
No GPU, no torch, no model: processes, threads, sockets and rings as those of a real vLLM."""


def run(
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1, max=64)] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", min=1, max=16)] = 1,
    dp: Annotated[int, typer.Option(help="Engines.", min=1, max=16)] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes, each on its own loopback address.", min=1, max=8)] = 1,
    fault: Annotated[
        str | None, typer.Option(metavar="NAME", help="Put this fault in; it brings its own server.")
    ] = None,
    after: Annotated[float, typer.Option(metavar="SECONDS", help="... so long after it is ready.", min=0)] = 0.0,
) -> int:
    """Start a server, say what it consists of, and keep it until Ctrl-C."""
    from vllmdiag.lab.faults import named
    from vllmdiag.lab.inject import inject
    from vllmdiag.lab.leftovers import clear_up
    from vllmdiag.lab.server import Lab, Shape

    hint(clear_up())
    write = Output().write
    chosen = named(fault) if fault is not None else None
    with Lab(chosen.start() if chosen is not None else Shape(tp=tp, pp=pp, dp=dp, nodes=nodes)) as lab:
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

"""`vllmdiag ring`: the shared-memory queues."""

from __future__ import annotations

from typing import Annotated

import typer

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.ring import ring_text

EPILOG = """Examples:

\b
  vllmdiag ring                         the only instance on this host
  vllmdiag ring 2839 --window 10        polled for ten seconds
  vllmdiag ring --peek                  the name of the call in each slot, never an argument

\b
Rings are read with pread, never mapped: nothing is allocated in them and nobody notices."""


def run(
    common: Common,
    peek: Annotated[
        bool, typer.Option("--peek", help="Name the call in each slot; arguments are never shown.")
    ] = False,
) -> int:
    """Show the slots of each ring, its writer, and how far behind each reader stands."""
    return show(common, instance_view(common, "peek" if peek else "ring"), ("rings",), ring_text)

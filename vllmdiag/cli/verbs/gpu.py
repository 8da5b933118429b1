"""`vllmdiag gpu`: devices, NCCL and the flight recorder, by rank."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from vllmdiag.cli.look import live_only, show, snapshot
from vllmdiag.cli.options import Common
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.render.gpu import gpu_text

EPILOG = """Examples:

\b
  vllmdiag gpu                          the only instance on this host
  vllmdiag gpu 2839 --window 10         counts and utilisation over ten seconds
  vllmdiag gpu -v                       a row for each rank, the ranks of each communicator
  vllmdiag gpu --trigger-fr             also ask torch for dumps of its flight recorder

\b
NVML is asked by a child that is killed when it hangs; NCCL's RAS port is asked twice for its status.
Dumps of the flight recorder that exist are read, never executed. --trigger-fr makes the server run code."""


def run(
    common: Common,
    trigger_fr: Annotated[
        bool,
        typer.Option("--trigger-fr", help="Ask the ranks for flight recorder dumps; the server runs code for that."),
    ] = False,
) -> int:
    """Show one row for each rank; those that agree are folded, those that differ are named."""
    from vllmdiag.diagnosis.view import view

    live_only(common, "--trigger-fr" if trigger_fr else "")
    seen = snapshot(common, "gpu")
    if trigger_fr:
        seen = _with_dumps(seen)
    return show(common, view(seen), ("gpu",), gpu_text)


def _with_dumps(seen: Snapshot) -> Snapshot:
    """The snapshot with dumps that the ranks were asked for after it was taken."""
    from vllmdiag.acts.flight_recorder import COST, trigger

    print(f"vllmdiag: --trigger-fr {COST}", file=sys.stderr)
    members = [process for process in seen.processes if process.pid in set(seen.target_pids)]
    records, holes = trigger(members)
    return msgspec.structs.replace(seen, flight_records=tuple(records), missing=(*seen.missing, *holes))

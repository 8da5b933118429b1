"""`vllmdiag endpoints`: sockets, from the one who binds."""

from __future__ import annotations

from vllmdiag.cli.look import ProbeZmq, instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.endpoints import endpoints_text

EPILOG = """Examples:

\b
  vllmdiag endpoints                    the only instance on this host
  vllmdiag endpoints 2839
  vllmdiag endpoints --probe-zmq        and the type that each one tells
  vllmdiag endpoints --format json | jq '.endpoints[] | select(.path_exists == false)'"""


def run(common: Common, probe_zmq: ProbeZmq = False) -> int:
    """Show who binds each endpoint, who is connected, and what waits there."""
    return show(common, instance_view(common, "endpoints", probe_zmq), ("endpoints",), endpoints_text)

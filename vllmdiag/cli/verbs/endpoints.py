"""`vllmdiag endpoints`: sockets, from the one who binds."""

from __future__ import annotations

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.endpoints import endpoints_text

EPILOG = """Examples:

\b
  vllmdiag endpoints                    the only instance on this host
  vllmdiag endpoints 2839
  vllmdiag endpoints --format json | jq '.endpoints[] | select(.path_exists == false)'"""


def run(common: Common) -> int:
    """Show who binds each endpoint, who is connected, and what waits there."""
    return show(common, instance_view(common, "endpoints"), ("endpoints",), endpoints_text)

"""`vllmdiag client`: the HTTP side."""

from __future__ import annotations

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.client import client_text

EPILOG = """Examples:

\b
  vllmdiag client --port 8000
  vllmdiag client 2839 --window 10      counters over ten seconds

\b
Only GET /health, /version and /metrics are sent, each with a deadline."""


def run(common: Common) -> int:
    """Show connections, health and counters of the HTTP ports."""
    return show(common, instance_view(common, "client"), ("clients",), client_text)

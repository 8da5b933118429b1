"""`vllmdiag stacks`: Python stacks."""

from __future__ import annotations

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.stacks import stacks_text

EPILOG = """Examples:

\b
  vllmdiag stacks                       the only instance on this host
  vllmdiag stacks 2839 --window 10      dumps spread over ten seconds
  vllmdiag stacks -v                    all frames of all threads

\b
Taken by py-spy without stopping the processes: a stack that moves may be torn."""


def run(common: Common) -> int:
    """Show the Python stacks, equal ones folded."""
    return show(common, instance_view(common, "stacks"), ("stacks",), stacks_text)

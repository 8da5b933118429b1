"""`vllmdiag shm`: shared memory."""

from __future__ import annotations

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common
from vllmdiag.render.shm import shm_text

EPILOG = """Examples:

\b
  vllmdiag shm                          the only instance on this host, and what is orphaned
  vllmdiag shm 2839 -v                  small and foreign segments too
  vllmdiag shm clean                    what could be removed"""


def run(common: Common) -> int:
    """Show capacity, segments and who holds them."""
    return show(
        common,
        instance_view(common, "shm"),
        (
            "mounts",
            "segments",
            "members",
        ),
        shm_text,
    )

"""`vllmdiag shm clean`: what may be removed from /dev/shm, and with --yes its removal."""

from __future__ import annotations

from typing import Annotated

import typer

from vllmdiag.cli.look import host_view, instance_view, live_only, show
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode
from vllmdiag.model.view import Removals
from vllmdiag.render.document import to_json
from vllmdiag.render.shm import orphans_text, removals_text

EPILOG = """Examples:

\b
  vllmdiag shm clean                    show what would be removed, and why it is safe
  vllmdiag shm clean --yes              remove it

\b
Only segments that are vLLM's own by name and size, and that no process of this machine has open or mapped.
That is proved again right before each removal; where a process cannot be asked, nothing is removed.
Run it as root, or as the user of vLLM, who sees the descriptors of all its processes."""


def run(
    common: Common,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only shown.")] = False,
) -> int:
    """Show or remove the segments that nobody holds."""
    live_only(common, "shm clean")
    seen = host_view() if common.target is None and common.port is None else instance_view(common, "shm")
    if not yes:
        return show(common, seen, ("segments",), orphans_text)
    from vllmdiag.acts.clean import remove_orphans

    removals = remove_orphans(seen.segments)
    as_json = common.format is Format.JSON
    common.output.write(
        to_json(Removals(removals=tuple(removals))) if as_json else removals_text(removals, common.output.style)
    )
    return ExitCode.OK if all(removal.removed for removal in removals) else ExitCode.WARNING

"""`vllmdiag ps`: the processes of one instance, or the instances of the host."""

from __future__ import annotations

from vllmdiag.cli.look import instance_view, show
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode
from vllmdiag.model.view import Instances
from vllmdiag.render.document import to_json
from vllmdiag.render.ps import instances_text, ps_text

EPILOG = """Examples:

\b
  vllmdiag ps                           the only instance on this host; with several, a list of them
  vllmdiag ps 2863                      the instance that pid 2863 belongs to
  vllmdiag ps --format json | jq '.members[] | select(.abnormal)'"""


def run(common: Common) -> int:
    """Show the tree of the instance; with several on the host and none chosen, list them."""
    if common.target is None and common.port is None and common.source is None:
        from vllmdiag.sources.collect import list_instances

        instances = tuple(list_instances())
        if len(instances) > 1:
            as_json = common.format is Format.JSON
            common.output.write(
                to_json(Instances(instances=instances)) if as_json else instances_text(instances, common.output.style)
            )
            return ExitCode.OK
    return show(common, instance_view(common, "ps"), ("members",), ps_text)

"""`vllmdiag diagnose`: the verdict."""

from __future__ import annotations

from vllmdiag.cli.look import ProbeZmq, snapshot
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.document import to_json
from vllmdiag.render.verdict import diagnosis_text

EPILOG = """Examples:

\b
  vllmdiag diagnose                     the only instance on this host
  vllmdiag diagnose 2839                the instance that pid 2839 belongs to
  vllmdiag diagnose --port 8000 --window 10
  vllmdiag diagnose --from bundle.tar.gz
  vllmdiag diagnose --format json | jq '.verdict | .cause, .subject.label'

\b
Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown (too little could be observed)."""

EXIT = {
    "ok": ExitCode.OK,
    "warning": ExitCode.WARNING,
    "critical": ExitCode.CRITICAL,
    "unknown": ExitCode.UNKNOWN,
}
"""Status of a verdict -> exit code."""


def run(common: Common, probe_zmq: ProbeZmq = False) -> int:
    """Name the first blocker."""
    from vllmdiag.diagnosis.judge import diagnose

    diagnosis = diagnose(snapshot(common, "diagnose", probe_zmq))
    as_json = common.format is Format.JSON
    common.output.write(to_json(diagnosis) if as_json else diagnosis_text(diagnosis, common.output.style))
    return EXIT[diagnosis.verdict.status]

"""`check` as workflow commands of GitHub Actions: an annotation for each finding and each expectation that is not met.

Form: https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

from vllmdiag.model.check import CheckResult
from vllmdiag.model.diagnosis import Status

from .page import clean

_COMMAND: dict[Status, str] = {"ok": "notice", "warning": "warning", "critical": "error", "unknown": "warning"}


def github_text(result: CheckResult) -> str:
    """Write a check as annotations: first the result, then what is behind it."""
    command = "notice" if result.exit_code == 0 else _COMMAND[result.status]
    lines = [_annotation(command, f"vLLM {result.status.upper()}", result.summary)]
    lines += [
        _annotation("error", f"expected {e.name}", f"wanted {e.wanted}, found {e.found}")
        for e in result.expectations
        if not e.met
    ]
    for finding in result.counted:
        text = "\n".join([finding.summary, *finding.evidence, *(f"next: {step.command}" for step in finding.next)])
        lines.append(_annotation("error" if finding.severity == "critical" else "warning", finding.cause, text))
    lines += [_annotation("notice", aside.cause, f"{aside.summary} ({aside.why})") for aside in result.set_aside]
    return "\n".join(lines) + "\n"


def _annotation(command: str, title: str, text: str) -> str:
    return f"::{command} title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    """A message: line breaks are escaped, other controls have no business in a log."""
    lines = (clean(line) for line in text.replace("%", "%25").splitlines())
    return "%0A".join(lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

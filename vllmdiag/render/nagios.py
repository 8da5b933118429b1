"""`check` as a Nagios plug-in says it (Icinga, Sensu, checkmk): status and text, a bar, performance data.

Form: https://nagios-plugins.org/doc/guidelines.html. The exit code is the state; the first line is what a pager shows,
further lines are for the page of the service.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllmdiag.model.check import CheckResult, Measure
from vllmdiag.model.errors import VllmdiagError

from .page import clean

_SERVICE = "VLLM"


def nagios_text(result: CheckResult) -> str:
    """Write a check as plug-in output."""
    first = f"{_SERVICE} {result.status.upper()} - {_plain(result.summary)}"
    lines = [f"{first} | {_performance(result.measures)}" if result.measures else first]
    for finding in result.counted:
        lines += [_plain(fact) for fact in finding.evidence]
        lines += [f"next: {_plain(step.command)}" for step in finding.next]
    lines += [_plain(f"set aside: {aside.cause} of {aside.subject} ({aside.why})") for aside in result.set_aside]
    return "\n".join(lines) + "\n"


def nagios_error(error: VllmdiagError) -> str:
    """Write what kept a check from judging: a plug-in says UNKNOWN then, on stdout."""
    lines = [f"{_SERVICE} UNKNOWN - {_plain(error.what)}"]
    lines += [f"{key}: {_plain(text)}" for key, text in (("why", error.why), ("next", error.next)) if text]
    return "\n".join(lines) + "\n"


def _performance(measures: Iterable[Measure]) -> str:
    """``'label'=value[unit];[warn];[crit];[min];[max]``, separated by blanks. Nothing is thresholded here."""
    return " ".join(f"'{_label(m)}'={m.value:g}{m.unit};;;0" for m in measures)


def _label(measure: Measure) -> str:
    """Name and label values; an equals sign or a quote may not stand in it."""
    words = " ".join([measure.name, *measure.labels.values()])
    return words.replace("=", ":").replace("'", "").replace("|", "/")


def _plain(text: str) -> str:
    """One line without a bar, which begins the performance data."""
    return clean(" ".join(text.split())).replace("|", "/")

"""`check` as metrics, for a scrape or for the text-file collector of an exporter. Written by prometheus_client.

Only gauges: a text-file collector reads an older form that knows neither state sets nor infos.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from vllmdiag.model.check import CheckResult
from vllmdiag.model.errors import VllmdiagError

_STATUS = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}
_STATUS_HELP = "0 ok, 1 warning, 2 critical, 3 unknown."
_PREFIX = "vllmdiag"


def families(result: CheckResult) -> Iterator[Metric]:
    """The metrics of one check, one family after another."""
    verdict = result.diagnosis.verdict
    yield _gauge("status", _STATUS_HELP, {}, _STATUS[result.status])
    yield _gauge(
        "verdict_info",
        "What was found; the value is always 1.",
        {
            "profile": result.profile,
            "status": result.status,
            "cause": result.counted[0].cause if result.counted else verdict.cause,
            "subject": result.counted[0].subject.label if result.counted else verdict.subject.label,
        },
        1,
    )
    yield _gauge("window_seconds", "How long it was watched.", {}, result.diagnosis.window_s)
    findings = GaugeMetricFamily(
        f"{_PREFIX}_finding",
        "1 for each finding; `counts` says whether it is behind the status.",
        labels=("cause", "layer", "severity", "subject", "counts"),
    )
    for finding in result.counted:
        row = (finding.cause, str(finding.layer), finding.severity, finding.subject.label, "true")
        findings.add_metric(row, 1)
    for aside in result.set_aside:
        findings.add_metric((aside.cause, str(aside.layer), aside.severity, aside.subject, "false"), 1)
    yield findings
    yield from _measures(result)


def _measures(result: CheckResult) -> Iterator[Metric]:
    grouped: dict[str, GaugeMetricFamily] = {}
    for measure in result.measures:
        family = grouped.get(measure.name)
        if family is None:
            family = GaugeMetricFamily(f"{_PREFIX}_{measure.name}", measure.help, labels=tuple(measure.labels))
            grouped[measure.name] = family
        family.add_metric(tuple(measure.labels.values()), measure.value)
    yield from grouped.values()


def failure(error: VllmdiagError) -> Iterator[Metric]:
    """The metrics where no check could be made: the status is unknown, and why."""
    yield _gauge("status", _STATUS_HELP, {}, _STATUS["unknown"])
    yield _gauge(
        "failed", "1 where no check could be made.", {"code": error.exit_code.name.lower(), "what": error.what}, 1
    )


def openmetrics_text(result: CheckResult) -> str:
    """Write a check in the OpenMetrics text form."""
    registry = CollectorRegistry()
    registry.register(_Held(result))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


class _Held(Collector):
    """A collector of one result."""

    def __init__(self, result: CheckResult) -> None:
        self._result = result

    def collect(self) -> Iterator[Metric]:
        return families(self._result)


def _gauge(name: str, help: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", help, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family

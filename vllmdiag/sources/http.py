"""What an API server says over HTTP: its health, its version, its counters."""

from __future__ import annotations

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.http import HttpProbe, MetricsScrape

from .httpclient import Endpoint, get
from .prometheus import parse_metrics


def probe(endpoint: Endpoint, path: str, *, deadline_s: float = 2.0, t: float = 0.0) -> HttpProbe:
    """One GET. Whatever the server does ends up in the value, within `deadline_s`.

    Raises:
        UsageError: a path other than /health, /metrics, /version.
    """
    answer = get(endpoint, path, deadline_s)
    return HttpProbe(
        t=t,
        port=endpoint.port,
        path=path,
        status=answer.status,
        error=answer.error,
        connect_s=answer.connect_s,
        first_byte_s=answer.first_byte_s,
        total_s=answer.total_s,
        version=_version(answer.body) if path == "/version" and answer.status == 200 else None,
    )


def scrape(endpoint: Endpoint, *, deadline_s: float = 2.0, t: float = 0.0) -> MetricsScrape | Missing:
    """The samples of /metrics that matter, see `parse_metrics`."""
    answer = get(endpoint, "/metrics", deadline_s)
    what = f"metrics of port {endpoint.port}"
    if answer.error or answer.status != 200:
        return Missing(what=what, why=answer.error or f"HTTP {answer.status}", next="see the probe of /health")
    values = parse_metrics(answer.body)
    if not values:
        return Missing(what=what, why="no vLLM metric on the page", next="start the server without --disable-log-stats")
    return MetricsScrape(t=t, port=endpoint.port, values=values)


class _Version(msgspec.Struct):
    version: str


def _version(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Version).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None

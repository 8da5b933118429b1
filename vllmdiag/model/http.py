"""What is recorded of HTTP: one value per GET, and the counters that matter out of /metrics."""

from __future__ import annotations

from .base import Fact


class HttpProbe(Fact, frozen=True, kw_only=True):
    """One request to one port of the instance, with the time each stage took (seconds, None where not reached)."""

    t: float
    port: int
    path: str
    status: int | None
    """HTTP status, None where no answer came."""
    error: str = ""
    """``refused``, ``timeout``, ``reset`` or other words; empty when answered."""
    connect_s: float | None = None
    first_byte_s: float | None = None
    total_s: float | None = None
    version: str | None = None
    """vLLM's version, from /version."""
    method: str = "GET"
    proxy: str = ""
    """The proxy that the request went through; empty where it went straight to the server, or that is not known."""


class ClientView(Fact, frozen=True, kw_only=True):
    """What a client saw of one streamed answer, as somebody has measured it. None where it does not tell."""

    first_byte_s: float | None = None
    """Seconds from the request to the first byte of the answer."""
    burst_chunks: float | None = None
    """Chunks that came at once."""
    burst_gap_s: float | None = None
    """Seconds between two such bursts."""
    text: str = ""
    """The line that says so."""


class MetricsScrape(Fact, frozen=True, kw_only=True):
    """The samples of /metrics that show motion, one value per (metric, engine)."""

    t: float
    port: int
    values: dict[str, dict[str, float]]
    """metric name without ``vllm:`` -> engine label ("" where absent) -> value, summed over other labels.

    Some are also given one by one for the values of a label, as ``num_requests_waiting_by_reason:deferred``,
    ``engine_sleep_state:awake``, ``request_success_total:abort``.
    """

"""Which samples of /metrics show motion or outstanding work (vLLM 0.8 to 0.33, vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

import msgspec

from .tables import load


class MetricNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names as vLLM writes them, without the prefix."""

    prefix: str
    engine_label: str
    """The label that tells the engines of one server apart."""
    kept: tuple[str, ...]
    """Samples that are recorded; everything else on the page is dropped."""
    split: dict[str, str]
    """Metric -> label whose values are also recorded one by one, as ``metric:value``."""
    renamed: dict[str, str]
    """Name in old releases -> name today. 0.9 and 0.10 write both, with the same value."""


METRICS = load("metrics", MetricNames)

"""The text format of Prometheus, as far as vLLM's /metrics needs it. Pure: a page in, values out."""

from __future__ import annotations

import math
import re

from vllmdiag.vllm.metrics import METRICS

_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+\S+)?\s*', re.ASCII)
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


def parse_metrics(page: bytes) -> dict[str, dict[str, float]]:
    """The kept samples of a page in Prometheus' text format: metric -> engine -> value.

    Values are summed over all other labels; a split metric is also recorded as ``metric:label value``. Lines that are
    not sound, and values that are not finite, are left out.
    """
    values: dict[str, dict[str, float]] = {}
    for line in page.decode("utf-8", "replace").split("\n"):
        sample = _sample(line) if line.startswith(METRICS.prefix) else None
        if sample is None:
            continue
        name, labels, value = sample
        engine = labels.get(METRICS.engine_label, "")
        names = [name]
        if name in METRICS.split and METRICS.split[name] in labels:
            names.append(f"{name}:{labels[METRICS.split[name]]}")
        for each in names:
            series = values.setdefault(each, {})
            total = series.get(engine, 0.0) + value
            series[engine] = total if math.isfinite(total) else value
    for old, new in METRICS.renamed.items():
        series = values.pop(old, {})
        if series:
            values.setdefault(new, series)
    return values


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    found = _SAMPLE.fullmatch(line)
    if not found:
        return None
    name = found[1].removeprefix(METRICS.prefix)
    if name not in METRICS.kept and name not in METRICS.renamed:
        return None
    try:
        value = float(found[3])
    except ValueError:
        return None
    labels = {key: _unescape(text) for key, text in _LABEL.findall(found[2] or "")}
    return (name, labels, value) if math.isfinite(value) else None


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text)

"""Scrapes of /metrics. A second one, in the same text or in another file, shows motion."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.sources.prometheus import parse_metrics
from vllmdiag.vllm.metrics import METRICS

from .format import Context, block

_OPENS = re.compile(rf"^\s*(?:#\s+(?:HELP|TYPE)\s+\S+|{METRICS.prefix}\w+(?:\{{.*\}})?\s+[-+\d.eE]+\s*$)")
_GOES_ON = re.compile(
    r"^\s*(?:#\s+(?:HELP|TYPE|EOF)|[a-zA-Z_:][\w:]*(?:\{.*\})?\s+(?:[-+]?[\d.]+(?:[eE][-+]?\d+)?|NaN|[-+]?Inf)(?:\s+\d+)?\s*$)"
)
_PORT = re.compile(r":(\d{2,5})/metrics")


def _read(lines: Sequence[str], context: Context, draft: Draft) -> None:
    port = next((int(m[1]) for header in reversed(context.headers) if (m := _PORT.search(header))), 0)
    for page in _pages(lines):
        values = parse_metrics("\n".join(page).encode())
        if values:
            draft.scrape(port, values, context)


def _pages(lines: Sequence[str]) -> list[list[str]]:
    """One page for each scrape: a sample that comes again begins the next."""
    pages: list[list[str]] = [[]]
    seen: set[str] = set()
    for line in lines:
        text = line.strip()
        name = text.rpartition(" ")[0]
        if text.startswith(METRICS.prefix):
            if name in seen:
                pages.append([])
                seen = set()
            seen.add(name)
            pages[-1].append(text)
    return pages


FORMATS = (
    block(
        "/metrics",
        lambda line, _: _OPENS.match(line) is not None,
        lambda line, _: not line.strip() or _GOES_ON.match(line) is not None,
        _read,
        names=("metrics",),
    ),
)

"""Whether a reader that missed its ping looks at the ring again by itself, and after how long."""

from __future__ import annotations

from functools import cache

import msgspec

from .tables import load
from .versions import in_range


class _Recheck(msgspec.Struct, frozen=True):
    pings_since: str
    recheck_s: float
    source: str
    since: str | None = None
    until: str | None = None


@cache
def _table() -> _Recheck:
    return load("wakeup", _Recheck)


def recheck_s(version: str | None) -> float | None:
    """Seconds after which a sleeping reader looks at its flag again; None where it never does.

    Args:
        version: version of vLLM; where unknown it is taken to look again.
    """
    table = _table()
    return table.recheck_s if in_range(version, table.since, table.until) else None


def pings(version: str | None) -> bool:
    """Whether a writer pings its sleeping readers; before, readers never slept.

    Args:
        version: version of vLLM; where unknown it is taken to ping.
    """
    return in_range(version, _table().pings_since, None)

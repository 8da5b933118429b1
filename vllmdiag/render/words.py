"""Numbers and names as people read them: sizes, durations, rates, folded labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from vllmdiag.model.ranks import fold
from vllmdiag.model.view import Party

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n: float | None) -> str:
    """Bytes with a binary unit: ``167772190`` is ``160 MiB``; empty where not known."""
    if n is None:
        return ""
    value, unit = float(n), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0 or value >= 100 or value == int(value):
        return f"{value:.0f} {_UNITS[unit]}"
    return f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds as ``0.04 s``, ``3.0 s``, ``41 s``, ``12 min``, ``3.5 h``, ``2.1 d``; empty where not known."""
    if seconds is None:
        return ""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            value = seconds / unit
            digits = 0 if value >= 10 else 2 if unit == 1 and value < 0.1 else 1
            return f"{value:.{digits}f} {name}"
    return f"{seconds / 86400:.1f} d"


def number(value: float) -> str:
    """A count or a gauge without needless digits."""
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:.3g}"


def plural(n: int, noun: str, many: str | None = None) -> str:
    """``1 process``, ``2 processes``."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {many or (noun + ('es' if noun.endswith(('s', 'x', 'ch')) else 's'))}"


def fold_labels(labels: Iterable[str]) -> str:
    """Fold names that differ in their last number alone: ``Worker_TP0-2,5``; others follow, each named once."""
    groups: dict[str, list[int]] = {}
    for label in labels:
        match = re.fullmatch(r"(.*?)(\d+)", label)
        stem, last = (match[1], int(match[2])) if match else (label, -1)
        groups.setdefault(stem if match else label + "\0", []).append(last)
    return ", ".join(
        stem.removesuffix("\0") if last == [-1] * len(last) else stem + fold(last) for stem, last in groups.items()
    )


def who(party: Party | None, unknown: str = "not known") -> str:
    """``Worker_TP1 (pid 2863)``."""
    if party is None:
        return unknown
    return party.label if party.pid is None else f"{party.label} (pid {party.pid})"


def whom(parties: Iterable[Party]) -> str:
    """Several parties folded: one with its pid, more by name alone."""
    parties = tuple(parties)
    return who(parties[0]) if len(parties) == 1 else fold_labels(party.label for party in parties)


def between(values: Iterable[float | None], write: Callable[[float], str]) -> str:
    """One value, or the lowest and the highest of a folded group; empty where none is known."""
    seen = [value for value in values if value is not None]
    if not seen:
        return ""
    low, high = write(min(seen)), write(max(seen))
    return low if low == high else f"{low}..{high}"

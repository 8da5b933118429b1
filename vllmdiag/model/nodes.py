"""Node names folded for people: ``node[01-47],login`` instead of forty-eight names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def fold_nodes(names: Iterable[str]) -> str:
    """Fold names that differ in their last number, as node sets are written: ``gpu[001-003,7].site``; each name once.

    Numbers with leading zeros keep their width; a range never mixes them with others.
    """
    split = [_NUMBERED.fullmatch(name) or name for name in dict.fromkeys(names)]
    numbered = [found.groups() for found in split if not isinstance(found, str)]
    padded = {(head, len(n), tail) for head, n, tail in numbered if len(n) > len(str(int(n)))}
    groups: dict[tuple[str, str, int] | str, list[int]] = {}
    for found in split:
        if isinstance(found, str):
            groups[found] = []
            continue
        prefix, digits, suffix = found.groups()
        width = len(digits) if (prefix, len(digits), suffix) in padded else 0
        groups.setdefault((prefix, suffix, width), []).append(int(digits))
    return ",".join(key if isinstance(key, str) else _folded(key, numbers) for key, numbers in groups.items())


def _folded(key: tuple[str, str, int], numbers: list[int]) -> str:
    prefix, suffix, width = key
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ",".join("-".join(f"{n:0{width}}" for n in dict.fromkeys((run[0], run[-1]))) for run in runs)
    return f"{prefix}{words}{suffix}" if len(numbers) == 1 else f"{prefix}[{words}]{suffix}"

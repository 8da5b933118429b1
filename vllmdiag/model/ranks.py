"""Rank lists folded for people: ``0-2,5`` instead of ``0, 1, 2, 5``."""

from __future__ import annotations

from collections.abc import Iterable


def fold(numbers: Iterable[int]) -> str:
    """Fold integers into ranges: ``fold([0, 1, 2, 5]) == "0-2,5"``; empty in, empty out."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def unfold(text: str) -> list[int]:
    """The inverse of `fold`. Raises ValueError where the text is no rank list."""
    numbers: list[int] = []
    for part in text.split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        numbers.extend(range(int(first), int(last if dash else first) + 1))
    return numbers

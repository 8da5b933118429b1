"""One form for every figure: what was measured, ours, the peer in the same run, the ratio, and what it may be at most.

`show` prints the rows of one bench. Under ``python -m bench`` they also go to the file that ``VLLMDIAG_BENCH`` names,
and the whole table is printed at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One figure. Ratio is ours to the peer's."""

    what: str
    ours: float
    peer: float
    peer_name: str
    unit: str = "ms"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float:
        """Ours, as a multiple of the peer's."""
        return self.ours / self.peer if self.peer else float("inf")

    @property
    def held(self) -> bool:
        """The ratio is within its bounds; a row without one is for information."""
        return (self.at_most is None or self.ratio <= self.at_most) and (
            self.at_least is None or self.ratio >= self.at_least
        )

    @property
    def bound(self) -> str:
        """In words."""
        words = [f"at most {self.at_most:.2f}"] if self.at_most is not None else []
        words += [f"at least {self.at_least:.2f}"] if self.at_least is not None else []
        return " and ".join(words)


def show(title: str, rows: Iterable[Row]) -> int:
    """Print the rows under a title.

    Returns:
        0 when every row is within its bounds, else 1: the exit code of a bench.
    """
    rows = list(rows)
    print(title)
    print(text(rows), end="")
    if path := os.environ.get("VLLMDIAG_BENCH"):
        with Path(path).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(not all(row.held for row in rows))


def text(rows: Iterable[Row]) -> str:
    """The rows as aligned lines, under a head."""
    cells = [("", "ours", "peer", "", "ratio", "must be", "")]
    cells += [
        (
            row.what,
            f"{row.ours:,.4g} {row.unit}",
            f"{row.peer:,.4g} {row.unit}",
            row.peer_name,
            f"{row.ratio:.2f}",
            row.bound,
            "" if row.held else "NOT HELD",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = (False, True, True, False, True, False, False)
    lines = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in cells
    )
    return "".join(f"  {line.rstrip()}\n" for line in lines)

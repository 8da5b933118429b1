"""Writes the table of verbs into README.md: `python -m tools.verbs` (a test says when it is behind)."""

from __future__ import annotations

import re
import sys

from tools.session import README
from vllmdiag.cli.app import VERBS

_TABLE = re.compile(r"(?<=<!-- verbs -->\n).*?(?=<!-- /verbs -->)", re.DOTALL)


def table() -> str:
    """The verbs in the order of the help."""
    rows = (f"| `{name}` | {summary} |\n" for name, summary in VERBS.items())
    return "| verb | |\n| --- | --- |\n" + "".join(rows)


def written() -> str:
    """The table that stands in the README. Raises ValueError where there is none."""
    found = _TABLE.search(README.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("README.md has no place for the table of verbs")
    return found[0]


def main() -> int:
    """Write it."""
    text = README.read_text(encoding="utf-8")
    README.write_text(_TABLE.sub(lambda _: table(), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

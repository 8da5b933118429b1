"""What an experiment has to say."""

from __future__ import annotations

import msgspec


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at, and what was measured."""

    look_at: str
    rows: tuple[tuple[str, str], ...]
    """(what, the measured value with its unit)."""
    learned: str
    """What it means for a server."""

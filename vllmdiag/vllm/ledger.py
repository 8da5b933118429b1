"""How large the messages of one request and one step are, as recorded; `vllmdiag.plan.ledger` does the arithmetic."""

from __future__ import annotations

from functools import cache

import msgspec

from .tables import load


class MessageSize(msgspec.Struct, frozen=True):
    """Bytes of one thing that travels."""

    name: str
    bytes: int
    per: str
    source: str
    estimate: bool = False
    """Not recorded: by its encoding."""


class LedgerTable(msgspec.Struct, frozen=True):
    """The table."""

    sizes: tuple[MessageSize, ...]
    out_of_band_from: int
    """Arrays of so many bytes are copied into the slot as they are; smaller ones become part of the pickle."""
    out_of_band_since: str
    out_of_band_source: str

    def size(self, name: str) -> int:
        """Bytes of one. Raises KeyError for what is not in the table."""
        return {s.name: s.bytes for s in self.sizes}[name]


@cache
def ledger_table() -> LedgerTable:
    """The table."""
    return load("ledger", LedgerTable)

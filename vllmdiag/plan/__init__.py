"""Capacity before the start, and the ledger of copies: arithmetic on a topology, nothing of the machine."""

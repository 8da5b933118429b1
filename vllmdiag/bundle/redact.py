"""Replaces by stable tokens what must not leave the host. Pure: a snapshot in, a snapshot out."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.bundle import Redaction
from vllmdiag.model.snapshot import Snapshot


class Redactor:
    """Tokens under one key."""

    def __init__(self, key: bytes, account: Redaction) -> None:
        self._key, self.account = key, account

    def snapshots(self, snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
        """The snapshots with everything replaced that must not leave the host."""
        raise NotImplementedError

"""What one process of vLLM takes of the kernel's tables, as recorded, and the limits it meets by default.

Counts are linear in what the process is connected to: a base, and so much for each engine, worker, API server ...
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from .tables import load


class Appetite(msgspec.Struct, frozen=True):
    """Descriptors and threads of one process of a role, idle; empty where never recorded."""

    role: str
    fds: dict[str, int]
    threads: dict[str, int]
    source: str
    at_least: bool = False


class DefaultLimit(msgspec.Struct, frozen=True):
    """A limit as it stands where nobody has changed it."""

    name: str
    value: int
    source: str


class FixedPort(msgspec.Struct, frozen=True):
    """A port that vLLM binds unless told otherwise."""

    purpose: str
    port: int
    source: str


class Arena(msgspec.Struct, frozen=True):
    """The tensor arena of an engine."""

    slots: int
    slot_bytes: int
    source: str

    def size(self, readers: int) -> int:
        """Bytes of its file."""
        return self.slots * (self.slot_bytes + 1 + readers)


class Capacity(msgspec.Struct, frozen=True):
    """The whole table."""

    roles: tuple[Appetite, ...]
    limits: tuple[DefaultLimit, ...]
    ports: tuple[FixedPort, ...]
    arena_bytes: Arena
    ipc_name: int
    """Characters of the name of a unix socket."""

    def appetite(self, role: str) -> Appetite:
        """What a process of that role takes. Raises KeyError for a role that is not in the table."""
        return {a.role: a for a in self.roles}[role]

    def port(self, purpose: str) -> int:
        """The default port of that purpose."""
        return {p.purpose: p.port for p in self.ports}[purpose]


@cache
def capacity() -> Capacity:
    """The table."""
    return load("capacity", Capacity)


def amount(parts: Mapping[str, int], of: Mapping[str, int]) -> int | None:
    """``base`` plus so much for each of what `of` counts; None where the table has nothing."""
    if not parts:
        return None
    return sum(n * (1 if name == "base" else of.get(name, 0)) for name, n in parts.items())

"""The base of every recorded value, and the value that stands where a fact could not be had."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded value: immutable, keyword-only, encodes to JSON and back without loss."""


class Missing(msgspec.Struct, frozen=True, kw_only=True, tag="missing", order=True):
    """A fact that could not be observed. Blind is never healthy, so the hole is a value of its own."""

    what: str
    """What is not known, e.g. ``stacks of pid 4310``."""
    why: str
    """Why, in words, with the errno name where there was one."""
    next: str
    """What would make it known: a command, or a capability to add."""


def known(value: T | Missing) -> T | None:
    """The value, or None where it is missing."""
    return None if isinstance(value, Missing) else value

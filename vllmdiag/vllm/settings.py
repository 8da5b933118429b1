"""Environment variables that change how a vLLM server behaves, with their defaults by version; and which may be read.

Only what stands in the table is ever collected from a process. A secret is listed so that it can be recognised and left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from .tables import load
from .versions import in_range


class Default(msgspec.Struct, frozen=True):
    """A default over a range of versions."""

    value: str
    since: str | None = None
    until: str | None = None


class Setting(msgspec.Struct, frozen=True):
    """One environment variable."""

    name: str
    meaning: str
    source: str
    secret: bool = False
    """Its value must never be read, shown or kept."""
    unit: str = ""
    defaults: tuple[Default, ...] = ()
    since: str | None = None
    until: str | None = None


@cache
def settings() -> Mapping[str, Setting]:
    """Every known variable by name."""
    return {setting.name: setting for setting in load("settings", tuple[Setting, ...])}


ENVIRON_ALLOWED: frozenset[str] = frozenset(name for name, setting in settings().items() if not setting.secret)
"""Variables that may be collected; of a proxy (``*_proxy``) only that it is set, as its URL may hold a password."""


def default(name: str, version: str | None = None) -> str | None:
    """What vLLM takes where the variable is not set: the newest default where the version is unknown.

    Returns:
        None where that version does not know the variable, or its default is not a fixed text.
    """
    setting = settings().get(name)
    if setting is None or not in_range(version, setting.since, setting.until):
        return None
    fitting = [d.value for d in setting.defaults if in_range(version, d.since, d.until)]
    return fitting[-1] if fitting else None

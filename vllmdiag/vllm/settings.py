"""Environment variables that change how a vLLM server behaves, with their defaults by version; and which may be read.

Only what stands in the table is ever collected from a process. A secret is listed so that it can be recognised and left
out; of a proxy only that it is set is told, because its URL may hold a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

import msgspec

from .tables import load
from .versions import in_range

SET = "set"
"""Stands for the value of a variable of which only the presence is told."""


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
    collect: Literal["value", "presence", "never"] = "value"
    unit: str = ""
    defaults: tuple[Default, ...] = ()
    since: str | None = None
    until: str | None = None

    @property
    def secret(self) -> bool:
        """Its value must never be read, shown or kept."""
        return self.collect == "never"


@cache
def settings() -> Mapping[str, Setting]:
    """Every known variable by name."""
    return {setting.name: setting for setting in load("settings", tuple[Setting, ...])}


ENVIRON_ALLOWED: frozenset[str] = frozenset(name for name, setting in settings().items() if not setting.secret)
"""Variables that may be collected. Pass each through `collected`."""


def collected(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that may be kept; of some variables only that they are set."""
    return {
        name: value if settings()[name].collect == "value" else SET
        for name, value in environ.items()
        if name in ENVIRON_ALLOWED
    }


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

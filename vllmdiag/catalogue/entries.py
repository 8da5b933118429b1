"""Every cause a verdict can name: layer, severity, meaning, the evidence that sets it apart, the next step."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import msgspec


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command to run next. `{pid}`, `{engine}`, `{port}` and the like are filled in from the finding."""

    command: str
    why: str
    risk: str = "none"
    """``none`` for read-only, else what it may break."""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry."""

    slug: str
    layer: int
    severity: Literal["ok", "info", "warning", "critical"]
    title: str
    meaning: str
    evidence: str
    """What sets it apart from its look-alikes."""
    not_to_be_confused: str
    """The look-alike that must not match."""
    next: tuple[Step, ...] = ()
    shown_by: tuple[str, ...] = ()
    """Tests on a live server or lab that show it."""
    not_shown: str = ""
    """Why there is none."""


@cache
def catalogue() -> dict[str, Cause]:
    """All causes by slug."""
    directory = resources.files(__package__).joinpath("causes")
    files = [directory.joinpath(f"layer{layer}.json") for layer in range(6)]
    causes = [cause for file in files for cause in msgspec.json.decode(file.read_bytes(), type=tuple[Cause, ...])]
    return {cause.slug: cause for cause in causes}


def cause(slug: str) -> Cause:
    """One entry. Raises KeyError for a slug that the catalogue does not have."""
    return catalogue()[slug]

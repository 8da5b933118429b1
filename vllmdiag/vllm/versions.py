"""vLLM version strings, reduced to what tells one release from the next."""

from __future__ import annotations

import re
from functools import cache

Version = tuple[int, ...]

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@cache
def parse(text: str) -> Version | None:
    """The release a version string belongs to: ``0.11.2.dev3+g1a2b`` and ``v0.11.2rc1`` are both ``(0, 11, 2)``.

    Returns None where the text tells nothing: ``dev``, and ``0.1.dev...``, which is what a build from a clone without
    tags calls itself.
    """
    found = _NUMBERS.match(text.strip())
    if found is None:
        return None
    version = tuple(int(part or 0) for part in found.groups())
    built_without_tags = version < (0, 2) and "dev" in text
    return None if built_without_tags else version


def in_range(version: str | Version | None, since: str | None, until: str | None) -> bool:
    """Whether a version lies in ``[since, until]``; both ends belong to it and ``until="0.10"`` includes 0.10.2.

    An unknown version is in every range: not to know the version must not hide anything.
    """
    if isinstance(version, str):
        version = parse(version)
    if version is None:
        return True
    first, last = _bound(since), _bound(until)
    return (first is None or version[: len(first)] >= first) and (last is None or version[: len(last)] <= last)


@cache
def _bound(text: str | None) -> Version | None:
    return None if text is None else tuple(int(part) for part in text.split("."))

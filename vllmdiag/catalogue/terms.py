"""The words that verdicts and playbooks use, explained in a few lines each."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One word."""

    name: str
    text: str
    also: tuple[str, ...] = ()
    """Other ways to write it, and words that mean the same."""
    see: tuple[str, ...] = ()
    """Other terms and causes, and commands of vllmdiag that show it."""


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in alphabetical order."""
    raw = resources.files(__package__).joinpath("terms.json").read_bytes()
    return tuple(sorted(msgspec.json.decode(raw, type=tuple[Term, ...]), key=lambda term: term.name.lower()))


def plain(word: str) -> str:
    """A word as it is looked up: lower case, with blanks for hyphens and underscores."""
    return " ".join(word.lower().replace("-", " ").replace("_", " ").split())


@cache
def _index() -> dict[str, Term]:
    return {plain(name): term for term in terms() for name in (term.name, *term.also)}


def find(word: str) -> Term | None:
    """The term of that name, however it is written; None where there is none."""
    return _index().get(plain(word))


def names() -> tuple[str, ...]:
    """Every name that `find` knows, as it is looked up."""
    return tuple(_index())

"""Symptom first: which playbooks fit some lines of a log, or the words of somebody who describes what he sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec

from vllmdiag.model.playbook import KnownLine
from vllmdiag.vllm import loglines

from .playbooks import Playbook, playbooks

_LOG_LINE, _ECHO = 12, 3
"""Points for a known log line that a playbook names, and for one that is only an echo. A word is worth one point,
two where it stands in a phrase as the playbook has it, so a log line outweighs a symptom in words."""
_MOST = 8

_SIDES = {
    "writer": "said by the writer of a ring: it is full, somebody does not read",
    "reader": "said by a reader of a ring: it waits for a message, as a rule for the reply of a worker",
}
"""The same words come from both sides; the line number of the log tells which."""


class Match(msgspec.Struct, frozen=True):
    """A playbook that fits."""

    book: Playbook
    score: int
    because: tuple[str, ...]


class _Found(NamedTuple):
    line: KnownLine
    parts: frozenset[str]
    """What the line names (an exit code), or which side says it; `log_lines` may ask for one of them."""


def known_lines(text: str) -> tuple[KnownLine, ...]:
    """The known lines of a log in a text, each kind once, in the order in which they come."""
    return tuple(found.line for found in _found(text))


def _found(text: str) -> tuple[_Found, ...]:
    found: dict[str, _Found] = {}
    for line in text.splitlines():
        match = loglines.find(line)
        if match is None:
            continue
        kind = match.kind
        side = loglines.side_of(line) if kind.id == "long_wait" else None
        parts = frozenset([side] if side else [] if kind.id == "long_wait" else match.groups.values())
        if kind.id in found:
            found[kind.id] = found[kind.id]._replace(parts=found[kind.id].parts | parts)
            continue
        said = re.search(kind.regex, line)
        known = KnownLine(
            id=kind.id,
            said=said[0] if said is not None else line.strip(),
            meaning=_SIDES[side] if side else kind.meaning,
            echo=kind.echo and side != "writer",
        )
        found[kind.id] = _Found(known, parts)
    return tuple(found.values())


def match(text: str) -> tuple[Match, ...]:
    """The playbooks that fit best, best first; equal ones in the order of layers, the healthy last.

    Args:
        text: lines of a log, or a symptom in words.

    Returns:
        None of them where nothing fits.
    """
    lines = _found(text)
    said = [_words(line) for line in text.splitlines()]
    matches = [_judge(book, lines, said) for book in playbooks().values()]
    best = sorted((m for m in matches if m.score), key=lambda m: (-m.score, m.book.layer == 0))
    return tuple(best[:_MOST])


def _judge(book: Playbook, found: tuple[_Found, ...], said: list[list[str]]) -> Match:
    score, because = 0, []
    for line, parts in found:
        if _asks_for(book, line.id, parts):
            score += _ECHO if line.echo else _LOG_LINE
            because.append(f"log line: {line.said}" + (" (an echo)" if line.echo else ""))
    for phrase, words in _phrases(book):
        points = max((_points(words, line) for line in said), default=0)
        if points:
            score += points
            because.append(f"words: {phrase}")
    return Match(book, score, tuple(because))


def _asks_for(book: Playbook, kind: str, parts: frozenset[str]) -> bool:
    """The playbook names this line; of one that asks for a part, where the line has that part or tells none at all."""
    wanted = {name.partition(":")[2] for name in book.log_lines if name.partition(":")[0] == kind}
    return bool(wanted) and (not parts or "" in wanted or bool(wanted & parts))


@cache
def _phrases(book: Playbook) -> tuple[tuple[str, tuple[str, ...]], ...]:
    # A name of one word (idle, busy) stands in too many sentences to mean the cause.
    name = [book.cause.replace("-", " ")] if "-" in book.cause else []
    phrases = dict.fromkeys([*name, book.title, *book.keywords])
    return tuple((phrase, tuple(_words(phrase))) for phrase in phrases)


def _points(phrase: tuple[str, ...], line: list[str]) -> int:
    """Two for each word of a phrase that stands in the line as it is, one for each where only all its words do."""
    n = len(phrase)
    if any(tuple(line[i : i + n]) == phrase for i in range(len(line) - n + 1)):
        return 2 * n
    return n if n > 1 and set(phrase) <= set(line) else 0


def _words(text: str) -> list[str]:
    return list(_stems(text))


def _stems(text: str) -> Iterator[str]:
    """Words in lower case without the endings that people vary: hangs, hanging, hanged."""
    for word in re.findall(r"[a-z0-9_]+", text.lower()):
        yield re.sub(r"(?<=[a-z]{3})(?:ing|ed|es|s)$", "", word)

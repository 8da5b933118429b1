"""Symptom first: which playbooks fit some lines of a log, or the words of somebody who describes what he sees."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import msgspec

from vllmdiag.model.playbook import KnownLine
from vllmdiag.vllm import loglines

from .playbooks import Playbook, playbooks

_LOG_LINE, _ECHO = 12, 3
"""Points for a known log line that a playbook names, and for one that is only an echo; one more where no other playbook
names it. A word is worth one point, two where it stands in a phrase as the playbook has it, so a log line outweighs a
symptom in words."""
_MOST = 8

_COMMON = 0.4
"""A word that stands in a larger part of the playbooks says nothing of any of them."""
_WORDS, _WEIGHT = 3, 5.0
"""Words, and their weight together, from which a description resembles a playbook. A word weighs the logarithm
of how rare it is; one of the title or the keywords counts twice."""
_DESCRIPTION = 80
"""A text of more different words is a log and no description."""

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
    said = {line: frozenset(line) for line in map(tuple, map(_words, text.splitlines())) if line}
    words = frozenset(word for line in said for word in line)
    # A log speaks by its known lines and by phrases; only of people's own words do we ask what they resemble.
    told = words if not lines and len(words) <= _DESCRIPTION else frozenset()
    matches = [_judge(book, lines, said, told) for book in playbooks().values()]
    best = sorted((m for m in matches if m.score), key=lambda m: (-m.score, m.book.severity == "ok"))
    return tuple(best[:_MOST])


def _judge(
    book: Playbook, found: tuple[_Found, ...], said: Mapping[tuple[str, ...], frozenset[str]], told: frozenset[str]
) -> Match:
    score, because = 0, []
    for line, parts in found:
        if names := _asked(book, line.id, parts):
            score += (_ECHO if line.echo else _LOG_LINE) + any(_askers()[name] == 1 for name in names)
            because.append(f"log line: {line.said}" + (" (an echo)" if line.echo else ""))
    for phrase, words in _phrases(book):
        asked = frozenset(words)
        points = max((_points(words, line) for line, has in said.items() if asked <= has), default=0)
        if points:
            score += points
            because.append(f"words: {phrase}")
    weights = {word: weight for word, weight in _weights()[book.cause].items() if word in told}
    if len(weights) >= _WORDS and sum(weights.values()) >= _WEIGHT:
        score += round(sum(weights.values()) / 2)
        because.append(f"it speaks of {', '.join(sorted(weights, key=lambda word: (-weights[word], word))[:6])}")
    return Match(book, score, tuple(because))


@cache
def _weights() -> Mapping[str, Mapping[str, float]]:
    """Cause -> word -> how much it speaks for this cause: what is rare among the playbooks weighs most."""
    books = playbooks().values()
    heads = {book.cause: set(_words(f"{book.cause} {book.title} {' '.join(book.keywords)}")) for book in books}
    texts = {book.cause: heads[book.cause] | set(_words(f"{book.evidence} {_told(book)}")) for book in books}
    among = Counter(word for words in texts.values() for word in words)
    rare = {word: math.log(len(texts) / n) for word, n in among.items() if n <= _COMMON * len(texts) and len(word) > 1}
    return {
        cause: {word: rare[word] * (2 if word in heads[cause] else 1) for word in words if word in rare}
        for cause, words in texts.items()
    }


def _told(book: Playbook) -> str:
    """The sections in which it is told what is seen and how it comes about; the others tell what to do."""
    return book.body.partition("## How to be sure")[0]


def _asked(book: Playbook, kind: str, parts: frozenset[str]) -> list[str]:
    """What the playbook asks for of this kind of line, as it stands in its `log_lines`; empty where it does not.

    Of one that asks for a part: where the line has that part, or tells none at all.
    """
    wanted = [name.partition(":") for name in book.log_lines]
    return [
        head + colon + part for head, colon, part in wanted if head == kind and (not part or not parts or part in parts)
    ]


@cache
def _askers() -> Counter[str]:
    """How many playbooks ask for a line."""
    return Counter(name for book in playbooks().values() for name in book.log_lines)


@cache
def _phrases(book: Playbook) -> tuple[tuple[str, tuple[str, ...]], ...]:
    # A name of one word (idle, busy) stands in too many sentences to mean the cause.
    name = [book.cause.replace("-", " ")] if "-" in book.cause else []
    phrases = dict.fromkeys([*name, book.title, *book.keywords])
    return tuple((phrase, tuple(_words(phrase))) for phrase in phrases)


def _points(phrase: tuple[str, ...], line: tuple[str, ...]) -> int:
    """For a line with every word of a phrase: two a word where they stand in order, else one if they are several."""
    n = len(phrase)
    in_order = any(line[i : i + n] == phrase for i in range(len(line) - n + 1))
    return 2 * n if in_order else n if n > 1 else 0


def _words(text: str) -> list[str]:
    return list(_stems(text))


def _stems(text: str) -> Iterator[str]:
    """Words in lower case without the endings that people vary: hangs, hanging, hanged."""
    for word in re.findall(r"[a-z0-9_]+", text.lower()):
        yield re.sub(r"(?<=[a-z]{3})(?:ing|ed|es|s)$", "", word)

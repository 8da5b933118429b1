"""Cut what people paste into sections, line by line: files, code fences, headers, quotes. Nothing is held as a whole.

A bug report is Markdown with fences, quoted mail, hard-wrapped lines and colours of a terminal; a support archive is a
directory of files. Both become a stream of clean lines, each with the words around it that say what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

LONGEST_LINE = 1 << 20
"""Characters of a line that are kept: a longer one is no evidence that a person could have read."""


@dataclass(frozen=True)
class Piece:
    """One file, standard input, or a member of an archive, as lines."""

    source: str
    """For people: the path as it was given."""
    lines: Iterable[str]


@dataclass(frozen=True)
class Binary:
    """A file that is no text."""

    source: str
    read: Callable[[], bytes]
    """All of it, as far as a binary is read at all."""


class Line(NamedTuple):
    """A clean line and where it stands."""

    text: str
    number: int
    """In its file, from 1."""
    kind: str
    """``text``; ``start`` of a fence (text is what stands before it: a heading, a summary), ``end`` of one."""
    fenced: bool
    """It stands inside a fence, or in a file that has none so far."""


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u200e\u200f\ufeff]")
_FENCE = re.compile(r"^\s{0,12}(?:[-*+]\s+|\d+[.)]\s+)?(`{3,}|~{3,})\s*([\w+-]*)\s*$")
_TAG = re.compile(r"</?(?:details|summary|pre|code|p|br|div|span|b|strong|h[1-6])(?:\s[^<>]*)?/?>", re.IGNORECASE)
_QUOTE = re.compile(r"^\s{0,3}>\s?")
_CURL = re.compile(r"^> (?:(?:GET|POST|HEAD|PUT|OPTIONS|DELETE) (?:/|https?://)|[A-Za-z-]+: |$)")


def _depth(text: str) -> int:
    """How many marks of a quote a line begins with."""
    depth = 0
    while _QUOTE.match(text):
        text = _QUOTE.sub("", text, count=1)
        depth += 1
    return depth


def clean_lines(lines: Iterable[str]) -> Iterator[Line]:
    """Lines without colours, quotes, HTML tags and fences; fences become `Line`s of their own.

    Args:
        lines: decoded text, split at line feeds.
    """
    fence = ""
    title = ""
    quoted = 0
    seen_fence = False
    for number, raw in enumerate(lines, 1):
        text = raw[:LONGEST_LINE].rstrip("\r\n")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        if "\r" in text:  # a progress bar: its last state
            text = text.rstrip("\r").rpartition("\r")[2]
        if not text.isprintable():
            text = _CONTROL.sub("", text).replace("\u00a0", " ")
        if text.lstrip().startswith(">"):
            if not quoted and not _CURL.match(text):
                quoted = _depth(text)
            for _ in range(quoted):  # as deep as the quote began: what curl sends begins with the same mark
                text = _QUOTE.sub("", text, count=1)
        else:
            quoted = 0
        mark = _FENCE.match(text)
        if mark is not None and (not fence or (mark[1].startswith(fence) and not mark[2])):
            fence, start = ("", False) if fence else (mark[1], True)
            seen_fence = True
            yield Line(title if start else "", number, "start" if start else "end", bool(fence))
            title = "" if start else title
            continue
        if not fence and "<" in text and _TAG.search(text):
            text = _TAG.sub(" ", text).strip() if text.lstrip().startswith("<") else _TAG.sub("", text)
        if not fence and text.strip():
            title = text.strip()
        yield Line(text, number, "text", bool(fence) or not seen_fence)

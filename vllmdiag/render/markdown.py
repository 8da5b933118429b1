"""Markdown on a page: the plain kind that playbooks are written in (headings, paragraphs, lists, code, links)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from .page import Page, Span, Text

_ITEM = re.compile(r"(?P<mark>-|\d+\.) +(?P<text>.*)")
_INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\[(?P<label>[^\]]+)\]\((?P<url>[^)\s]+)\)")
_COMMENT = re.compile(r"(?P<command>.*?)(?P<why>\s{2,}# .*)?")


class Block(NamedTuple):
    """A piece of a Markdown text: ``heading``, ``text``, ``item`` (its mark in `mark`) or ``code``."""

    kind: str
    text: str
    mark: str = ""


def blocks(markdown: str) -> Iterator[Block]:
    """Take a text apart. Lines of a paragraph or an item are joined; a block of code is one `Block` a line."""
    in_code = False
    for empty, group in groupby(markdown.splitlines(), key=lambda line: not line.strip()):
        rows: list[str] = []
        for line in () if empty else group:
            if line.startswith("```"):
                yield from _flush(rows)
                in_code = not in_code
            elif in_code:
                yield Block("code", line)
            elif line.startswith("#"):
                yield from _flush(rows)
                yield Block("heading", line.lstrip("# "))
            else:
                if _ITEM.match(line):
                    yield from _flush(rows)
                rows.append(line.strip())
        yield from _flush(rows)


def _flush(rows: list[str]) -> Iterator[Block]:
    if rows:
        item = _ITEM.match(rows[0])
        rows[0] = item["text"] if item else rows[0]
        yield Block("item" if item else "text", " ".join(rows), item["mark"] if item else "")
        rows.clear()


def commands(markdown: str) -> Iterator[str]:
    """Every line of code in a text, without its comment."""
    for block in blocks(markdown):
        found = _COMMENT.fullmatch(block.text) if block.kind == "code" else None
        if found is not None and (command := found["command"].strip()) and not command.startswith("#"):
            yield command


def write(page: Page, markdown: str) -> None:
    """Add a Markdown text to a page. Code is never broken over lines; a link to another file is its name alone."""
    before = ""
    for block in blocks(markdown):
        if block.kind == "heading":
            page.section(block.text)
        elif block.kind == "code":
            found = _COMMENT.fullmatch(block.text)
            command, why = (found["command"], found["why"] or "") if found else (block.text, "")
            page.line(Span(command, "head", whole=True), Span(why, "dim"), indent=4, hang=8)
        elif block.kind == "item":
            page.line(f"{block.mark} ", *_inline(block.text), indent=2, hang=3 + len(block.mark))
        else:
            if before not in {"heading", ""}:
                page.gap()
            page.line(*_inline(block.text), indent=2, hang=2)
        before = block.kind


def _inline(text: str) -> Iterator[Text]:
    at = 0
    for found in _INLINE.finditer(text):
        yield text[at : found.start()]
        at = found.end()
        if found["code"]:
            yield Span(found["code"], "head", whole=True)
        elif found["strong"]:
            yield Span(found["strong"], "head")
        else:
            yield found["label"] if found["url"].endswith(".md") else f"{found['label']} ({found['url']})"
    yield text[at:]

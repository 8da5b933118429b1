"""The page that text output is written on: lines, aligned columns, wrapping, colour that never stands alone, ASCII.

One layout for terminals and pipes: colour and wrapping are the only differences, so what an engineer pastes into a
ticket is what the screen showed. No boxes. Text that comes from the machine (titles, paths) can hold anything, so
control characters are replaced before they reach a terminal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

Role = Literal["plain", "bad", "warn", "good", "dim", "head"]

_SGR: dict[Role, str] = {"plain": "", "bad": "1;31", "warn": "33", "good": "32", "dim": "2", "head": "1"}

# One character for one, so that columns stay aligned. The last seven (multiplication sign, curly quotes, dashes) come
# in with text from elsewhere.
_ASCII = str.maketrans("·→├└│─✓✗█…\u00d7\u2018\u2019\u201c\u201d\u2013\u2014", "->|`|-+x#~x''\"\"--")


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """How a page is written: wrap at `width` columns (None: never), with colour, in ASCII only, verbosity."""

    width: int | None = None
    colour: bool = False
    ascii: bool = False
    verbose: int = 0


class Span(NamedTuple):
    """A piece of text with the role it plays. A `whole` one (a command to copy) is never broken over lines."""

    text: str
    role: Role = "plain"
    whole: bool = False


Text = str | Span


def clean(text: str) -> str:
    """Replace what could steer a terminal (controls, escapes, direction marks) or break a line by ``?``."""
    return "".join("?" if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"} else c for c in text)


def columns(text: str) -> int:
    """Terminal columns that a cleaned text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class Page:
    """Collects lines; `text` gives the whole."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._lines: list[str] = []

    def line(self, *spans: Text, indent: int = 0, hang: int | None = None) -> None:
        """Add one line; where it is wider than the page it is wrapped, later lines indented by `hang` columns."""
        words = _words(spans)
        hang = indent + 2 if hang is None else hang
        width = self.style.width
        row: list[Span] = []
        used = indent
        start = indent
        for word in words:
            size = columns(word.text)
            room = width is None or used + size <= width
            if not room and row and not word.text.isspace():
                self._flush(row, start)
                row, used, start = [], hang, hang
            if row or not word.text.isspace() or start == indent:
                row.append(word)
                used += size
        self._flush(row, start)

    def table(
        self, rows: Sequence[Sequence[Text]], *, header: Sequence[str] = (), indent: int = 0, right: Iterable[int] = ()
    ) -> None:
        """Add aligned columns; those in `right` (0-based) align to the right, empty ones vanish, the last one wraps."""
        cells = [[_span(cell) for cell in row] for row in rows]
        if header:
            cells.insert(0, [Span(title.upper(), "dim") for title in header])
        n = max((len(row) for row in cells), default=0)
        widths = [max((columns(row[i].text) for row in cells if i < len(row)), default=0) for i in range(n)]
        body = cells[1:] if header else cells
        shown = [i for i in range(n) if any(i < len(row) and row[i].text for row in body)]
        for row in cells:
            spans: list[Text] = []
            at = indent
            for i in shown:
                cell = row[i] if i < len(row) else Span("")
                pad = " " * (widths[i] - columns(cell.text))
                if i == shown[-1]:
                    spans += [pad if i in right else "", cell]
                    break
                spans += [pad, cell, "  "] if i in right else [cell, pad + "  "]
                at += widths[i] + 2
            wide = self.style.width is not None and at > self.style.width - 20
            self.line(*spans, indent=indent, hang=indent + 4 if wide else at)

    def section(self, title: str) -> None:
        """Start a section: an empty line and its title."""
        if self._lines:
            self._lines.append("")
        self.line(Span(title, "head"))

    def gap(self) -> None:
        """Add an empty line."""
        self._lines.append("")

    def text(self) -> str:
        """The page, ending in a newline."""
        return "\n".join(self._lines) + "\n"

    def _flush(self, row: list[Span], indent: int) -> None:
        while row and row[-1].text.isspace():
            row.pop()
        self._lines.append((" " * indent + "".join(self._paint(span) for span in _merged(row))).rstrip())

    def _paint(self, span: Span) -> str:
        text = span.text
        if self.style.ascii:
            text = text.translate(_ASCII).encode("ascii", "replace").decode()
        code = _SGR[span.role]
        return f"\x1b[{code}m{text}\x1b[0m" if self.style.colour and code and text.strip() else text


def _span(text: Text) -> Span:
    span = Span(text) if isinstance(text, str) else text
    return span._replace(text=clean(span.text))


def _words(spans: Iterable[Text]) -> list[Span]:
    """Split spans into words and the white space between them, each with its role."""
    return [
        span._replace(text=word)
        for span in map(_span, spans)
        for word in ([span.text] if span.whole else re.findall(r"\s+|\S+", span.text))
    ]


def _merged(row: Iterable[Span]) -> list[Span]:
    """Join neighbours of one role, so that a coloured phrase is one escape sequence."""
    merged: list[Span] = []
    for span in row:
        if merged and merged[-1].role == span.role:
            merged[-1] = Span(merged[-1].text + span.text, span.role)
        else:
            merged.append(span)
    return merged

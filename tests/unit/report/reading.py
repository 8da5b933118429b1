"""A page as a reader's program sees it: elements with their attributes, and the text between them."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = frozenset(["meta", "link", "br", "img", "hr", "input"])
_BLOCKS = frozenset(["p", "h1", "h2", "h3", "li", "tr", "summary", "title", "desc", "figcaption", "code"])


class Reading(HTMLParser):
    """Parses a page; raises AssertionError where an element is closed that is not the open one."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.lines: list[str] = [""]
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in _BLOCKS:
            self.lines.append("#" * int(tag[1]) + " " if tag in ("h1", "h2", "h3") else "")
        elif tag in ("td", "th", "text"):
            self.lines[-1] += " "
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.lines[-1] += data

    def text(self) -> str:
        """What can be read, a line for each block."""
        lines = (" ".join(line.split()) for line in self.lines)
        return "\n".join(line for line in lines if line.strip("# ")) + "\n"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

"""Evidence that is one JSON document, such as py-spy dump --json writes: read as a whole, by its shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.errors import BadDataError
from vllmdiag.sources.stacks import parse_py_spy_json

from .format import Context, Format, Reader
from .stacks import record

MOST_BYTES = 64 << 20
"""A longer document is not read: a dump of a thousand threads has less."""


def _is_py_spy(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, dict) and "frames" in t for t in value)


def _read_py_spy(value: Any, context: Context, draft: Draft) -> None:
    for pid in dict.fromkeys(thread.get("pid") for thread in value):
        own = [thread for thread in value if thread.get("pid") == pid]
        threads = list(parse_py_spy_json(json.dumps(own).encode()))
        info = own[0].get("process_info") or {}
        title = info.get("command_line") or "" if isinstance(info, dict) else ""
        record(draft, context, pid if isinstance(pid, int) else context.pid, threads, str(title))


SHAPES: list[tuple[str, Callable[[Any], bool], Callable[[Any, Context, Draft], None]]] = [
    ("py-spy dump --json", _is_py_spy, _read_py_spy),
]
"""Name, whether a document is one, and what reads it. Other importers add theirs."""


class _Document(Reader):
    """Gathers lines until they make a whole document."""

    def __init__(self, context: Context, draft: Draft) -> None:
        self._context, self._draft = context, draft
        self._lines: list[str] = []
        self._size = 0
        self._depth = 0
        self._in_string = False
        self._done = False
        self._broken = False

    def refused(self) -> Sequence[str]:
        """All but the line that looked like the begin of a document."""
        return self._lines[1:] if self._broken else ()

    def take(self, line: str) -> bool:
        if self._done or self._size > MOST_BYTES:
            return False
        self._lines.append(line)
        self._size += len(line)
        self._count(line)
        self._done = self._depth <= 0
        return True

    def _count(self, line: str) -> None:
        """Follow the brackets outside of strings: the document ends where they close."""
        escaped = False
        for char in line:
            if escaped:
                escaped = False
            elif self._in_string:
                escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1

    def close(self) -> None:
        where = f"the JSON of {self._context.source} from line {self._context.line}"
        try:
            value = json.loads("\n".join(self._lines))
        except (ValueError, RecursionError) as error:
            self._draft.missing(where, f"damaged: {error}", "copy it again")
            self._broken = True
            return
        for _, fits, read in SHAPES:
            if fits(value):
                try:
                    read(value, self._context, self._draft)
                except (BadDataError, TypeError, ValueError, KeyError, AttributeError) as error:
                    self._draft.missing(where, f"damaged: {error}", "copy it again")
                return
        self._draft.missing(where, "not understood: JSON of an unknown shape", "none: the rest was judged")


def _opens(line: str, _context: Context) -> bool:
    text = line.strip()
    return text in ("[", "{", "[{") or text.startswith(("[{", '{"', "[ {", '{ "'))


def _reader(context: Context, draft: Draft) -> Reader:
    return _Document(context, draft)


FORMATS = (Format(name="JSON", opens=_opens, reader=_reader),)

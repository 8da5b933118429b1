"""Pasted evidence in, Snapshot out: each section is recognised by its content and read by its importer."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, cast

from vllmdiag.model.errors import BadDataError
from vllmdiag.model.snapshot import Snapshot

from .archive import captured
from .draft import Draft
from .importers import formats, read_binary
from .importers.format import PROMPT, Context, Format, Reader
from .inputs import DAMAGE, names_of, pieces_of
from .pieces import Binary, Line, Piece, clean_lines

_MOST_UNKNOWN = 50
"""Stretches that were not understood and are listed one by one."""
_TELL_EVERY = 8 << 20
"""Characters of one piece after which it is told how far it has been read."""
_LOOK = re.compile(r"(?:^|[_.-])(?:t|look|sample|snapshot|dump|round)[_.-]?(\d{1,3})(?![0-9])", re.IGNORECASE)
_AFTER = re.compile(r"(?:^|[_. -])(?:after|later|second|2nd)(?:$|[_. -])", re.IGNORECASE)
_NODE = re.compile(r"(?:^|[/_.\s-])((?:node|host|worker-?node)[-_ ]?(?:\d{1,4}|[a-z](?![a-z])))", re.IGNORECASE)
_PID = re.compile(r"/proc/(\d+)(?:/|\b)|\bpid[ :=]+(\d+)|(?:--pid|-p)[ =](\d+)|\bof (\d{2,7})\b", re.IGNORECASE)
_APART = re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:s|sec|seconds)\s+(?:apart|later)\b", re.IGNORECASE)
_CLOCK = re.compile(r"(?:^|[ T])([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:[.,]\d+)?")


_DIGITS = str.maketrans("123456789", "000000000")
_EXACT_LINES = 1000
"""Every line of a piece up to here is offered to every format."""
_OPENING_CHARS = 600
"""Of a longer line only the begin decides of which format it is."""
_MOST_SHAPES = 20_000


@dataclass
class _Stretch:
    """Lines that no format took."""

    source: str
    number: int
    first: str
    count: int = 1


@dataclass
class Triage:
    """Reads pieces one after another into one draft."""

    draft: Draft = field(default_factory=Draft)
    unknown: list[_Stretch] = field(default_factory=list)
    """What was not understood, in order, at most so many as are listed."""
    n_unknown: int = 0
    bundle: Snapshot | None = None
    """What `vllmdiag capture` has recorded, where that was given: it needs no importer."""

    def read(self, piece: Piece) -> None:
        """Read one file. What is damaged is left out and named; the rest is read.

        Args:
            piece: its lines may raise one of `inputs.DAMAGE` while they are read: what came before counts.
        """
        try:
            _Session(self, piece).run()
        except DAMAGE as error:
            self.draft.missing(f"the rest of {piece.source}", f"damaged: {error}", "copy it again")

    def read_binary(self, file: Binary) -> None:
        """Read a file that is no text, if it is of a kind that is known. Never raises for its content."""
        context = Context(source=file.source, name=_name(file.source))
        try:
            data = file.read()
        except DAMAGE as error:
            self.draft.missing(file.source, f"damaged: {error}", "copy it again")
            return
        if not read_binary(data, context, self.draft):
            self.draft.missing(file.source, "not understood: a binary file", "none: the rest was judged")

    def snapshot(self) -> Snapshot:
        """Everything read so far. What was not understood stands in `missing`."""
        if self.bundle is not None:
            return self.bundle
        for stretch in self.unknown:
            more = f" (and {stretch.count - 1} lines after it)" if stretch.count > 1 else ""
            self.draft.missing(
                f"what {stretch.source} says from line {stretch.number}",
                f"not understood: {stretch.first[:120]}{more}",
                "none: the rest was judged",
            )
        if self.n_unknown > len(self.unknown):
            self.draft.missing(
                f"{self.n_unknown - len(self.unknown)} more stretches of text",
                "not understood",
                "none: the rest was judged",
            )
        return self.draft.finish()


class _Session:
    """One piece: the section that is open, and the context that the next one will have."""

    def __init__(self, triage: Triage, piece: Piece) -> None:
        self._triage = triage
        self._piece = piece
        self._formats = formats()
        self._reader: Reader | None = None
        self._format: Format | None = None
        self._stretch: _Stretch | None = None
        self._fences = False
        self._lines = 0
        self._dull: set[str] = set()
        """Shapes of lines that no format opens."""
        self._first_unknown = (len(triage.unknown), triage.n_unknown)
        base = piece.source.replace("\\", "/").rpartition("/")[2]
        name = _name(piece.source)
        found = _LOOK.search(base.rpartition(".")[0] or base)
        self._look = int(found[1]) if found else 1 if _AFTER.search(name) else 0
        node = _NODE.search(piece.source)
        self._top = Context(
            source=piece.source,
            name=name,
            look=self._look,
            node=_node_name(node),
            node_of_file=node is not None,
        )
        self._context = self._top

    def run(self) -> None:
        try:
            for line in clean_lines(self._piece.lines):
                self._line(line)
        finally:
            self._close()

    def _line(self, line: Line) -> None:
        if line.kind != "text":
            self._close()
            self._stretch = None
            if not self._fences:
                self._forget_prose()
            self._fences = True
            self._begin(line)
            return
        text = line.text
        self._lines += 1
        # A long text repeats itself: once no format has opened a line, none will open the same with other numbers.
        shape = text.translate(_DIGITS) if self._lines > _EXACT_LINES else ""
        dull = shape in self._dull
        skip = dull and self._reader is not None and self._reader.takes_what_it_opens
        if self._reader is not None and not skip and self._reader.take(text):
            return
        chosen = self._opener(text) if text and not dull and not text.isspace() else None
        if shape and chosen is None and len(self._dull) < _MOST_SHAPES:
            self._dull.add(shape)
        if chosen is not None:
            self._close()
            self._open(chosen, line)
        elif self._reader is not None and self._reader.also(text):
            return
        elif not text or text.isspace():
            self._stretch = None
        else:
            self._close()
            if not self._header(text):
                self._not_understood(line)

    def _opener(self, text: str) -> Format | None:
        first: Format | None = None
        begin = text[:_OPENING_CHARS]
        for each in self._formats:
            if each.opens(begin, self._context):
                if any(self._context.name.startswith(name) for name in each.names):
                    return each
                first = first or each
        return first

    def _open(self, chosen: Format, line: Line) -> None:
        self._stretch = None
        self._format = chosen
        self._triage.draft.understood[chosen.name] = self._triage.draft.understood.get(chosen.name, 0) + 1
        context = replace(self._context, headers=list(self._context.headers), line=line.number)
        self._reader = chosen.reader(context, self._triage.draft)
        if not self._reader.take(line.text):
            self._close()

    def _close(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.close()
            self._again(reader.refused())

    def _again(self, lines: Sequence[str]) -> None:
        """Ask the other formats about lines that one has taken and could not use; each line at most once more."""
        if not lines:
            return
        formats, number = self._formats, self._context.line
        self._formats = tuple(each for each in formats if each is not self._format)
        for line in lines:
            self._line(Line(line, number, "text", fenced=True))
        self._close()
        self._formats = formats

    def _forget_prose(self) -> None:
        """What stood before the first fence of a report was prose: nobody expects it to be understood."""
        listed, count = self._first_unknown
        del self._triage.unknown[listed:]
        self._triage.n_unknown = count

    def _begin(self, line: Line) -> None:
        """A fence opens or ends: a new section, whose title is what stands before it."""
        self._context = replace(self._top, headers=[], line=line.number)
        if line.text:
            self._words(line.text)

    def _header(self, text: str) -> bool:
        """A comment, a heading or a command: it says what follows."""
        says = PROMPT.match(text) is not None or (len(text) < 120 and _APART.search(text) is not None)
        if says or _CLOCK.search(text[:40]):
            self._words(text)
        return says

    def _words(self, text: str) -> None:
        self._dull.clear()  # what a header announces may be known by it alone
        context = self._context
        context.header = text.strip()
        context.headers.append(context.header)
        pid = _PID.search(text)
        if pid is not None:
            context.pid = int(next(group for group in pid.groups() if group))
        apart = _APART.search(text)
        if apart is not None:
            self._triage.draft.apart_s = float(apart[1])
        clock = _CLOCK.search(text)
        if clock is not None:
            context.t = int(clock[1]) * 3600.0 + int(clock[2]) * 60 + int(clock[3])
        look = _LOOK.search(text) if len(text) < 120 else None
        if look is not None:
            context.look = int(look[1])
        node = _NODE.search(text) if len(text) < 120 else None
        if node is not None:
            context.node = _node_name(node)

    def _not_understood(self, line: Line) -> None:
        if not line.fenced or not any(char.isalnum() for char in line.text):
            return  # prose of a report around its fences; frames of a table
        if self._stretch is not None:
            self._stretch.count += 1
            return
        self._stretch = _Stretch(self._piece.source, line.number, line.text.strip())
        self._triage.n_unknown += 1
        if len(self._triage.unknown) < _MOST_UNKNOWN:
            self._triage.unknown.append(self._stretch)


def _name(source: str) -> str:
    return source.replace("\\", "/").rpartition("/")[2].partition(".")[0].lower()


def _node_name(found: re.Match[str] | None) -> str:
    return found[1].lower().replace("_", "-").replace(" ", "-") if found is not None else ""


def _told(piece: Piece, say: Callable[[str], None]) -> Iterator[str]:
    """The lines of a piece; of a long one it is said how far the reading is."""
    read, next_told = 0, _TELL_EVERY
    for line in piece.lines:
        read += len(line)
        if read >= next_told:
            next_told += _TELL_EVERY
            say(f"reading {piece.source}: {read >> 20} MB")
        yield line


def _peekable(stream: BinaryIO) -> io.BufferedReader:
    """Standard input as it is; a test or another room may give any stream."""
    if not isinstance(stream, io.BufferedReader):
        stream = io.BufferedReader(cast("io.RawIOBase", stream))
    return cast("io.BufferedReader", stream)


def triage(paths: Sequence[str], stdin: BinaryIO, say: Callable[[str], None] = lambda _words: None) -> Triage:
    """Read pasted evidence.

    Args:
        paths: files, directories and archives; ``-`` for standard input.
        stdin: read where ``-`` is given.
        say: told what is being read.

    Returns:
        What was understood, and what was not.

    Raises:
        TargetError, NotPermittedError: a path cannot be read.
        BadDataError: nothing of it could be understood, or it is a damaged bundle of `vllmdiag capture`.
    """
    done = Triage()
    stream = _peekable(stdin if "-" in paths else io.BytesIO())
    if len(paths) == 1 and (bundle := captured(paths[0], stream)) is not None:
        done.bundle = bundle.snapshot
        return done
    for piece in pieces_of(paths, stream, done.draft.missing):
        say(f"reading {piece.source}")
        if isinstance(piece, Piece):
            done.read(replace(piece, lines=_told(piece, say)))
        else:
            done.read_binary(piece)
    if done.draft.empty:
        holes = done.snapshot().missing
        raise BadDataError(
            f"nothing in {names_of(paths)} is evidence that can be judged",
            why="; ".join(f"{hole.what}: {hole.why}" for hole in holes[:3]),
            next="paste py-spy dumps, ps, ss, /metrics or the log of the server; see vllmdiag triage --help",
        )
    return done

"""The common shape of the importers of pasted evidence: a line opens a format, a reader takes what belongs to it.

Text arrives as lines, never as a whole: a log may have 200 MB. So a format does not score a text; it says of one line
whether that line is unmistakably its own (`Format.opens`), and its reader says of each following line whether it goes
on (`Reader.take`). `vllmdiag/bundle/importers/__init__.py` tells how to add one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllmdiag.bundle.draft import Draft

MOST_LINES = 200_000
"""Lines that one section of a block format may have; what follows is a new section."""


@dataclass
class Context:
    """What the words around a section say of it. One value for each section; readers may keep it."""

    source: str
    """Where it stands, for people: ``stacks.txt``, ``report.md, fence 3 (line 120)``."""
    name: str = ""
    """Lower-case name of the file without directories and endings; breaks ties between formats, nothing else."""
    node: str = ""
    """Machine it is of; empty where nothing tells."""
    node_of_file: bool = False
    """The file is of that machine: what no file of it tells is of another one."""
    pid: int | None = None
    """Process that the last header, comment or command named."""
    header: str = ""
    """The last comment or command above the section: ``# df -B1 /proc/77/root/dev/shm``, ``$ cat /proc/88/status``."""
    headers: list[str] = field(default_factory=list)
    """All comments and commands since the piece began, the last one last."""
    look: int = 0
    """0 for the first look, 1 for the second ...: from a suffix ``_t1`` or the order of the sections."""
    t: float | None = None
    """Seconds since an arbitrary zero, where a header gives a time of day; None where nothing does."""
    line: int = 0
    """Number of the line that opened the section, from 1."""

    @property
    def command(self) -> str:
        """The header without its prompt: ``df -B1 /proc/77/root/dev/shm``."""
        return PROMPT.sub("", self.header).strip()


class Reader(ABC):
    """Takes the lines of one section, the one that opened it first."""

    takes_what_it_opens = False
    """`take` accepts just the lines that open its format, and blank ones: it need not be asked about others."""

    @abstractmethod
    def take(self, line: str, /) -> bool:
        """Read the line if it is part of this section by itself; False ends the section."""

    def also(self, _line: str, /) -> bool:
        """Read a line that no format claims, if it may be a part of this section (a traceback in a log)."""
        return False

    def refused(self) -> Sequence[str]:
        """After close: lines that turned out to be of no use here; other formats are asked about them."""
        return ()

    def close(self) -> None:  # noqa: B027  most readers put what they read into the draft line by line
        """The section is over: put what was read into the draft."""


@dataclass(frozen=True)
class Format:
    """One format of evidence."""

    name: str
    """For people: ``py-spy dump``."""
    opens: Callable[[str, Context], bool]
    """Whether a section of this format begins with this line."""
    reader: Callable[[Context, Draft], Reader]
    names: tuple[str, ...] = ()
    """Beginnings of file names (lower case) that break a tie in its favour: ``("environ", "env")``."""


class Block(Reader):
    """Gathers the lines of a section and reads them at its end."""

    def __init__(
        self,
        goes_on: Callable[[str, Context], bool],
        read: Callable[[Sequence[str], Context], object],
        context: Context,
    ) -> None:
        self._goes_on = goes_on
        self._read = read
        self._context = context
        self._lines: list[str] = []

    def take(self, line: str) -> bool:
        """The first line always; then those that go on."""
        if self._lines and (len(self._lines) >= MOST_LINES or not self._goes_on(line, self._context)):
            return False
        self._lines.append(line)
        return True

    def close(self) -> None:
        """Read them."""
        self._read(self._lines, self._context)


def block(
    name: str,
    opens: str | Callable[[str, Context], bool],
    goes_on: str | Callable[[str, Context], bool],
    read: Callable[[Sequence[str], Context, Draft], object],
    names: tuple[str, ...] = (),
) -> Format:
    """A format whose sections are short enough to be read at once.

    Args:
        name: for people.
        opens: what its first line looks like: a regular expression that is searched for, or a function.
        goes_on: the same for each further line. Blank lines are offered too.
        read: puts the lines (the first included) into the draft.
        names: as in `Format`.
    """
    begins, continues = _test(opens), _test(goes_on)

    def reader(context: Context, draft: Draft) -> Reader:
        return Block(continues, lambda lines, its: read(lines, its, draft), context)

    return Format(name=name, opens=begins, reader=reader, names=names)


def _test(rule: str | Callable[[str, Context], bool]) -> Callable[[str, Context], bool]:
    if callable(rule):
        return rule
    found = re.compile(rule).search
    return lambda line, _context: found(line) is not None


PROMPT = re.compile(r"^\s*(?:#+|[$%>]|(?:\([^)]*\)\s*)?\[?[\w.-]+@[\w.-]+[^#$%]{0,60}[#$%]|\+)\s+")
"""How a comment, or a command behind the prompt of a shell, begins."""

r"""The formats of pasted evidence, in one table.

How to add one:

1. Write ``importers/<format>.py`` with one `Format` (or several). For a section that is short enough to be read at once
   use `format.block`::

       FORMAT = block(
           "nvidia-smi csv",
           opens=r"^# index, utilization\.gpu",       # this line alone begins a section of mine
           goes_on=r"^\d+, ",                          # each further line
           read=_read,                                 # (lines, context, draft) -> None
           names=("nvidia-smi",),                      # breaks ties only
       )

   `context` tells the pid, node, look (0 first, 1 second), and the comment or command above the section; see `Context`.
   For what must stream (logs) write a `Reader` with take, also and close, and give it as `Format.reader`.
   A format that spans the whole of a JSON document registers in `importers/documents.py` instead.
2. Put facts where the live sources put them: `draft.process(pid, context)` for a process (facts, sample, thread, dump,
   environ), `draft.socket`, `draft.scrapes`, `draft.add("accelerators", ...)` for any tuple field of the Snapshot,
   `draft.missing(...)` for what was damaged. A pid that stands for a process (an owner, a holder) goes through
   `draft.pid(pid, context)`, because two machines may use the same one. Never invent what the text does not hold.
3. Enter it in `_MODULES` below. Order matters only where one line opens two formats: the first wins, unless the name of
   the file says otherwise.
4. Tests: tests/unit/bundle/test_<format>.py, and a case below tests/cases.

A comment (``# ...``) or a command behind a prompt is kept in `context.header`; it opens a format itself only if that
format's `opens` says so. Lines come without ANSI colours, quote marks, HTML tags and line ends. Everything is evidence
to read, never an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from .format import Context, Format

if TYPE_CHECKING:
    from vllmdiag.bundle.draft import Draft

_MODULES = (
    "stacks", "ps", "rings", "metrics", "sockets", "shm", "http", "proc", "cgroup", "network",
    "gpu_users", "gpu", "gpu_paths", "nccl",
    "kernel", "host", "logs", "documents", "versions",
)  # fmt: skip


@cache
def formats() -> tuple[Format, ...]:
    """Every format, in the order in which they are asked."""
    found: list[Format] = []
    for name in _MODULES:
        found.extend(import_module(f"{__name__}.{name}").FORMATS)
    return tuple(found)


_BINARY: tuple[Callable[[bytes, Context, Draft], bool], ...] = ()
"""Readers of files that are no text: (data, context, draft) -> whether it was one of theirs."""


def read_binary(data: bytes, context: Context, draft: Draft) -> bool:
    """Read a file that is no text, if its kind is known. Says whether it was."""
    return any(read(data, context, draft) for read in _BINARY)

"""Which threads a process of vLLM has once it has started, and what a kernel thread name means."""

from __future__ import annotations

import re
from functools import cache, lru_cache

import msgspec

from vllmdiag.model.process import ThreadStack

from .tables import load
from .versions import in_range


class ExpectedThread(msgspec.Struct, frozen=True):
    """A Python thread vLLM starts."""

    role: str
    name: str
    """Its Python name, or a part of it: Python 3.10 and later call it ``Thread-1 (process_input_sockets)``."""
    function: str
    """The function it runs, to know it by where its name says nothing."""
    required: bool
    """Always there once the process has started: when it is missing it has died."""
    meaning: str
    source: str
    since: str | None = None
    until: str | None = None


class NativeThread(msgspec.Struct, frozen=True):
    """A thread of a library, known by its comm."""

    comm: str
    """Regular expression over the comm."""
    meaning: str
    source: str


class _Tables(msgspec.Struct, frozen=True):
    python: tuple[ExpectedThread, ...]
    native: tuple[NativeThread, ...]


@cache
def _tables() -> _Tables:
    return load("threads", _Tables)


@lru_cache(maxsize=256)
def expected(role: str, version: str | None = None) -> tuple[ExpectedThread, ...]:
    """The threads a process of that role has. Where the version is unknown, those of every version are given."""
    return tuple(t for t in _tables().python if t.role == role and in_range(version, t.since, t.until))


def is_thread(stack: ThreadStack, thread: ExpectedThread) -> bool:
    """Whether a stack is that thread: by its Python name, else by the function it runs."""
    names = (frame.name.rpartition(".")[2] for frame in stack.frames)
    return re.search(rf"\b{re.escape(thread.name)}\b", stack.name) is not None or thread.function in names


def native(comm: str) -> NativeThread | None:
    """What a thread of a library does, by its comm; None where its name says nothing (most carry the process's)."""
    return next((thread for thread in _tables().native if re.fullmatch(thread.comm, comm)), None)

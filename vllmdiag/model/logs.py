"""What is kept of a vLLM log: its first error, the echoes of it, and the few events that tell how it came to that."""

from __future__ import annotations

import msgspec

from .base import Fact


class LogEvent(Fact, frozen=True, kw_only=True):
    """Something that one process said, with whose words they are."""

    kind: str
    """Id of the known line (vllm/data/loglines.json); ``exception`` or ``error`` for one that no entry knows."""
    part: str = ""
    """``fault``, ``relay``, ``echo``, ``phase`` or ``note``, as in the table of known lines."""
    file: str = ""
    number: int = 0
    """Line, from 1; 0 where only the tail of the file was read."""
    text: str = ""
    """The line without its prefix, shortened."""
    groups: dict[str, str] = msgspec.field(default_factory=dict)
    """The named parts of a known line."""
    time: str = ""
    """As it stands in the log."""
    at: float | None = None
    """The same as seconds, to compare lines of one log (the year is left out); None where no line before had a time."""
    label: str = ""
    """How the line names its process: ``EngineCore_DP0``, ``Worker_TP1``; empty where it does not."""
    pid: int | None = None
    rank: int | None = None
    node: str = ""
    source: str = ""
    """File and line of the code that said it: ``shm_broadcast.py:871``."""
    exception: str = ""
    """Type of the exception; empty where there is none."""
    frame: str = ""
    """Innermost frame of its traceback: ``core.py:133 in __init__``."""
    count: int = 1
    """How often the same was said by the same process, this one included."""
    generation: int = 1
    """Which start of the server it belongs to, from 1."""


class LogRing(Fact, frozen=True, kw_only=True):
    """A ring that its writer has announced (the line of its handle)."""

    name: str
    readers: int
    chunk_bytes: int
    chunks: int
    label: str = ""
    pid: int | None = None


class LogAbort(Fact, frozen=True, kw_only=True):
    """A request that was aborted: how old it was, and how soon one of the same size came after it."""

    age_s: float
    again_s: float | None = None
    """Seconds until the next arrival of a request of the same length; None where none came within a minute."""


class LogDigest(Fact, frozen=True, kw_only=True):
    """One log, read from end to end (or its tail)."""

    file: str
    lines: int = 0
    bytes: int = 0
    whole: bool = True
    """False where only the tail was read."""
    version: str | None = None
    """vLLM's release, where the log says it."""
    generations: int = 1
    first_error: LogEvent | None = None
    """The first error of the generation that matters; None where the log holds no error that is not an echo."""
    echoes: tuple[LogEvent, ...] = ()
    """What only repeats that something has failed, each kind once a process."""
    other_errors: tuple[LogEvent, ...] = ()
    """Further errors after the first one: of other ranks as a rule."""
    phases: tuple[LogEvent, ...] = ()
    """Steps of the start-up and waits, the last of each kind and process."""
    rings: tuple[LogRing, ...] = ()
    arrived: int = 0
    """Requests that came, as far as they were logged."""
    aborts: tuple[LogAbort, ...] = ()
    """Of those whose arrival is in the log too; the last 200."""
    served: bool = False
    """The last generation has come up."""
    failed: bool = False
    """The last generation has ended with an error, as far as the log tells."""
    last_time: str = ""

"""What differs between two looks: rank by rank, ring by ring, counter by counter. The JSON of `diff`."""

from __future__ import annotations

from typing import Literal

from .base import Fact

DIFF_SCHEMA = "vllmdiag.diff/1"

Fate = Literal["same", "restarted", "appeared", "gone"]
"""``restarted``: the same role and rank in another process."""


class Side(Fact, frozen=True, kw_only=True):
    """One of the two looks."""

    source: str
    """The file."""
    observed_at: str = ""
    window_s: float = 0.0
    status: str = ""
    """Of the verdict, as this vllmdiag judges it now."""
    cause: str = ""
    summary: str = ""
    key_id: str = ""
    """Of the tokens; empty where nothing was redacted."""


class Change(Fact, frozen=True, kw_only=True):
    """One fact that differs."""

    what: str
    before: str | None = None
    """None where it was not there, or not known."""
    after: str | None = None
    detail: str = ""
    """e.g. the last frame that two stacks have in common."""


class Changes(Fact, frozen=True, kw_only=True):
    """What differs in one thing: a process, a ring, a device, an endpoint."""

    name: str
    """Role and rank, or what the thing is called in both looks."""
    fate: Fate = "same"
    pid_before: int | None = None
    pid_after: int | None = None
    changes: tuple[Change, ...] = ()


class CounterChange(Fact, frozen=True, kw_only=True):
    """A sample of /metrics that differs."""

    name: str
    engine: str = ""
    before: float | None = None
    after: float | None = None
    per_s: float | None = None
    """Between the two looks; None for a gauge, across a restart, or where the time between them is not known."""


class Diff(Fact, frozen=True, kw_only=True):
    """The whole difference. Only things that differ are named."""

    schema: str = DIFF_SCHEMA
    before: Side
    after: Side
    apart_s: float | None = None
    """Seconds between the ends of the two windows; None where a time is not known."""
    differs: bool
    instance: tuple[Change, ...] = ()
    """Verdict, versions, machine, options, what could be seen."""
    processes: tuple[Changes, ...] = ()
    rings: tuple[Changes, ...] = ()
    endpoints: tuple[Changes, ...] = ()
    counters: tuple[CounterChange, ...] = ()
    devices: tuple[Changes, ...] = ()
    not_compared: str = ""
    """Why names of hosts and paths were left out: tokens of different keys say nothing about each other."""

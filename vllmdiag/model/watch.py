"""What `watch` says while it runs: events, one JSON line each, and the frame that a terminal shows. Pure values."""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Fact
from .diagnosis import Confidence, Subject
from .view import InstanceView

EVENT_SCHEMA = "vllmdiag.event/1"

EventKind = Literal[
    "waiting",
    "watching",
    "status",
    "stall",
    "died",
    "long-wait",
    "captured",
    "command",
    "recovered",
    "ended",
    "problem",
    "stopped",
]
"""What happened.

- ``waiting``: no server is here, one is waited for. ``watching``: one was found (a new generation).
- ``status``: every so often, that it is watched and what moves.
- ``stall``: work is outstanding and nothing moves. ``died``: a member has ended. ``long-wait``: the server has logged
  its long-wait line. Each is captured once.
- ``captured``: a bundle was written. ``command``: the command of ``--on-stall`` has ended.
- ``recovered``: after a stall, work goes on. ``ended``: the server has ended.
- ``problem``: what `watch` itself could not do. ``stopped``: `watch` ends.
"""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=EVENT_SCHEMA):
    """One event. Fields that say nothing are left out of the JSON."""

    at: str
    """RFC 3339, UTC."""
    kind: EventKind
    summary: str
    generation: int = 0
    """Counts the servers that were watched, from 1; a restart is a new one. 0 before the first."""
    pid: int | None = None
    """Of the server: its first process."""
    port: int | None = None
    vllm_version: str | None = None
    cause: str | None = None
    """Slug of the catalogue (``stall``, ``died``, ``captured``)."""
    layer: int | None = None
    subject: Subject | None = None
    confidence: Confidence | None = None
    since_s: float | None = None
    """For how long nothing has moved, seconds."""
    messages_per_s: float | None = None
    """Over all rings, since the last event of this kind (``status``)."""
    bundle: str | None = None
    """Path of what was written (``captured``)."""
    exit_code: int | None = None
    """Of the command (``command``)."""


class Frame(Fact, frozen=True, kw_only=True):
    """One picture of an instance, live or replayed."""

    title: str
    """Which instance, in words."""
    at: str = ""
    """RFC 3339, UTC."""
    t: float = 0.0
    """Seconds since the watching (or the recording) of this generation began."""
    of_s: float | None = None
    """Length of the recording; None while live."""
    status: str = ""
    """What is thought of it: cause and summary of the last judgement, or empty."""
    bad: bool = False
    """The status is a fault."""
    still_s: float | None = None
    """For how long nothing has moved in any ring; None where something moves."""
    messages_per_s: float | None = None
    doing_age_s: float | None = None
    """How old the words about what each member does are."""
    view: InstanceView | None = None
    """Members and rings; None while no server is here."""
    events: tuple[Event, ...] = ()
    """The last ones, oldest first."""

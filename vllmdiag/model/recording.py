"""A recording of `watch --record`: what rings and processes did over minutes, as changes only.

The file is a run of gzip members (so ``zcat FILE | jq .`` shows it), one JSON object a line, told apart by ``kind``:

    begin   the first line of every member: schema, when t=0 was, the instance, its members and its rings
    flags   from `t` on the flags of ring number `ring` are these bytes (hexadecimal)
    member  from `t` on a process is in this state and does this
    seen    up to `t` everything was watched: silence until then means that nothing changed
    event   an event of `watch` at `t`

Each member begins with the state of everything, so any run of members is a recording: the oldest can be cut off, and
one that was being written when the machine died is lost from its last second only. Times are seconds after `at` of the
`begin` line, which is the same in all members of one generation. Payload is never recorded.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import msgspec

from .base import Fact
from .ring import Geometry, RingState, decode
from .view import Party
from .watch import Event

RECORDING_SCHEMA = "vllmdiag.recording/1"


class RecordedRing(Fact, frozen=True, kw_only=True):
    """One ring: what does not change."""

    segment: str
    queue: str
    """``broadcast ring``, ``response ring``, ``group ring`` or ``ring``."""
    geometry: Geometry
    writer: Party | None = None
    readers: tuple[Party | None, ...] = ()
    """By flag index; None where the index could not be joined to a process."""


class RecordedMember(Fact, frozen=True, kw_only=True):
    """One process of the instance: what does not change."""

    pid: int
    role: str
    label: str
    depth: int = 0
    """In the tree of the instance; parents come first."""


class Begin(Fact, frozen=True, kw_only=True, tag_field="kind", tag="begin"):
    """The first line of every block."""

    schema: str = RECORDING_SCHEMA
    tool: str = ""
    at: str
    """RFC 3339, UTC: t=0."""
    generation: int = 1
    """Counts the servers that were watched."""
    hz: float = 0.0
    """How often the flags were read, at most: shorter states are not seen."""
    node: str = ""
    pid: int | None = None
    port: int | None = None
    vllm_version: str | None = None
    model: str | None = None
    members: tuple[RecordedMember, ...] = ()
    rings: tuple[RecordedRing, ...] = ()


class FlagsLine(Fact, frozen=True, kw_only=True, tag_field="kind", tag="flags"):
    """The flags of one ring from `t` on."""

    t: float
    ring: int
    """Index in `Begin.rings`."""
    flags: str
    """``chunks * (1 + readers)`` bytes in hexadecimal; `vllmdiag.model.ring.decode` reads them."""


class MemberLine(Fact, frozen=True, kw_only=True, tag_field="kind", tag="member", omit_defaults=True):
    """What a process does from `t` on."""

    t: float
    pid: int
    state: str = ""
    """Letter of stat(5); empty when it is gone."""
    doing: str = ""
    """In words; from the last dump of its stack."""


class SeenLine(Fact, frozen=True, kw_only=True, tag_field="kind", tag="seen"):
    """Up to `t` everything was watched."""

    t: float


class EventLine(Fact, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """What `watch` said at `t`."""

    t: float
    event: Event


Line = Begin | FlagsLine | MemberLine | SeenLine | EventLine


class Track(Fact, frozen=True, kw_only=True):
    """The flags of one ring over time: from ``times[i]`` on they are ``flags[i]``."""

    ring: RecordedRing
    times: tuple[float, ...] = ()
    flags: tuple[bytes, ...] = ()

    def state_at(self, t: float) -> RingState | None:
        """The ring as it stood at `t`; None before the first look."""
        i = bisect_right(self.times, t) - 1
        return decode(self.flags[i], self.ring.geometry.n_readers) if i >= 0 else None

    def between(self, start: float, end: float) -> tuple[tuple[float, RingState], ...]:
        """(time, state) from `start` to `end`; the first is the state that stood at `start`."""
        first = max(0, bisect_right(self.times, start) - 1)
        last = bisect_right(self.times, end)
        n = self.ring.geometry.n_readers
        return tuple(
            (max(start, t), decode(flags, n))
            for t, flags in zip(self.times[first:last], self.flags[first:last], strict=True)
        )

    def still_since(self, t: float) -> float | None:
        """When the state at `t` began; None before the first look."""
        i = bisect_right(self.times, t) - 1
        return self.times[i] if i >= 0 else None


class RecordedGeneration(Fact, frozen=True, kw_only=True, dict=True):
    """One server from the first look to the last."""

    begin: Begin
    """Of its last block: members and rings that came later are there too."""
    tracks: tuple[Track, ...] = ()
    """One a ring, in the order of `Begin.rings`."""
    members: tuple[MemberLine, ...] = ()
    """Changes in order of time."""
    events: tuple[EventLine, ...] = ()
    start_s: float = 0.0
    """First time that was watched: later than 0 where the beginning was cut off."""
    end_s: float = 0.0

    @cached_property
    def _changes(self) -> dict[int, tuple[MemberLine, ...]]:
        found: dict[int, list[MemberLine]] = {}
        for line in self.members:
            found.setdefault(line.pid, []).append(line)
        return {pid: tuple(lines) for pid, lines in found.items()}

    def member_at(self, pid: int, t: float) -> MemberLine | None:
        """What a process did at `t`; None before the first look, or for a pid that is not recorded."""
        lines = self._changes.get(pid, ())
        i = bisect_right(lines, t, key=lambda line: line.t) - 1
        return lines[i] if i >= 0 else None


class Recording(Fact, frozen=True, kw_only=True):
    """A whole file."""

    generations: tuple[RecordedGeneration, ...] = ()
    cut: bool = False
    """It ends within a block: whoever wrote it was killed, or the file was copied while it grew."""


LINES = msgspec.json.Decoder(Line)
"""Reads one line."""

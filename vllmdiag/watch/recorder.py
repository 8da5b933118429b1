"""From rounds to lines of a recording: only what has changed since the last one."""

from __future__ import annotations

from pathlib import Path

from vllmdiag.model.recording import (
    Begin,
    EventLine,
    FlagsLine,
    MemberLine,
    RecordedMember,
    RecordedRing,
    SeenLine,
)
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceView, RingView
from vllmdiag.model.watch import Event

from .recording import RecordingWriter


class Recorder:
    """Records the rounds of one `watch`.

    Args:
        path: the file.
        max_bytes: its bound.
        hz: how often the flags are read.
    """

    def __init__(self, path: Path, max_bytes: int, hz: float) -> None:
        self._writer = RecordingWriter(path, max_bytes)
        self._hz = hz
        self._begin: Begin | None = None
        self._flags: dict[int, str] = {}
        self._members: dict[int, MemberLine] = {}
        self._t = 0.0

    def round(self, snapshot: Snapshot, view: InstanceView, generation: int, at: str, t: float) -> None:
        """Add a round.

        Args:
            snapshot: of it.
            view: of it.
            generation: number of the server.
            at: when its watching began, RFC 3339.
            t: seconds from then to the start of the round.
        """
        begin = self._header(snapshot, view, generation, at)
        if begin != self._begin:
            if self._begin is None or self._begin.rings != begin.rings or self._begin.generation != generation:
                self._flags.clear()
            self._writer.begin(begin)
            self._begin = begin
        self._t = round(t + snapshot.window_s, 4)
        self._writer.write(*self._member_lines(view, t), *self._flag_lines(snapshot, view, t), SeenLine(t=self._t))

    def event(self, event: Event) -> None:
        """Add an event of the server that is watched; one before the first is no part of a recording."""
        if self._begin is not None and event.generation == self._begin.generation:
            self._writer.write(EventLine(t=self._t, event=event))

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    def _header(self, snapshot: Snapshot, view: InstanceView, generation: int, at: str) -> Begin:
        members = [m for m in view.members if m.pid is not None]
        return Begin(
            tool=snapshot.tool,
            at=at,
            generation=generation,
            hz=self._hz,
            node=view.node,
            pid=members[0].pid if members else None,
            port=view.port,
            vllm_version=view.vllm_version,
            model=view.model,
            members=tuple(
                RecordedMember(pid=m.pid, role=m.role, label=m.label, depth=m.depth)
                for m in members
                if m.pid is not None
            ),
            rings=tuple(
                RecordedRing(
                    segment=ring.segment,
                    queue=ring.queue,
                    geometry=ring.geometry,
                    writer=ring.writer,
                    readers=tuple(reader.party for reader in ring.readers),
                )
                for ring in view.rings
            ),
        )

    def _flag_lines(self, snapshot: Snapshot, view: InstanceView, t: float) -> list[FlagsLine]:
        by_name = {s.name + (" (deleted)" if s.deleted else ""): s for s in snapshot.segments}
        lines = []
        for index, ring in enumerate(view.rings):
            for state in by_name[ring.segment].states:
                flags = _flags(ring, state.tail)
                if flags != self._flags.get(index):
                    self._flags[index] = flags
                    lines.append(FlagsLine(t=round(t + state.t, 4), ring=index, flags=flags))
        return sorted(lines, key=lambda line: line.t)

    def _member_lines(self, view: InstanceView, t: float) -> list[MemberLine]:
        lines = []
        for member in view.members:
            if member.pid is None:
                continue
            line = MemberLine(t=round(t, 4), pid=member.pid, state=member.state, doing=member.doing)
            before = self._members.get(member.pid)
            if before is None or (before.state, before.doing) != (line.state, line.doing):
                self._members[member.pid] = line
                lines.append(line)
        return lines


def _flags(ring: RingView, tail: bytes) -> str:
    return tail[-ring.geometry.metadata_bytes :].hex()

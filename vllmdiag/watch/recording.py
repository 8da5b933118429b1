"""Recordings on disk: written block by block within a bound, read back whole.

    recording = read_recording("night.rec")
    for generation in recording.generations:
        for track in generation.tracks:          # one a ring
            track.state_at(12.5)                  # a decoded RingState
            track.between(10.0, 20.0)             # ((t, RingState), ...)
        generation.member_at(2863, 12.5)          # state and what it does

The format is described in `vllmdiag.model.recording`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from vllmdiag.model.errors import BadDataError, NotPermittedError, UsageError
from vllmdiag.model.recording import (
    LINES,
    RECORDING_SCHEMA,
    Begin,
    EventLine,
    FlagsLine,
    Line,
    MemberLine,
    RecordedGeneration,
    RecordedRing,
    Recording,
    SeenLine,
    Track,
)

BLOCK_BYTES = 256 << 10
"""A block is closed when it has this many bytes."""
_GZIP = 31  # zlib's wbits for a gzip member
_PIECE = 1 << 16


class RecordingWriter:
    """Appends lines to a file that never grows beyond `max_bytes`; when it would, the older half is dropped.

    Args:
        path: the file; one that is there is replaced.
        max_bytes: bound of the file.

    Raises:
        NotPermittedError, UsageError: the file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int = 16 << 20, block_bytes: int = BLOCK_BYTES) -> None:
        self._path = path
        self._max = max_bytes
        self._block_bytes = min(block_bytes, max(1, max_bytes // 4))
        self._blocks: list[int] = []
        self._size = 0
        self._pack: zlib._Compress | None = None
        self._begin: Begin | None = None
        self._flags: dict[int, FlagsLine] = {}
        self._members: dict[int, MemberLine] = {}
        try:
            self._file = path.open("wb")
        except PermissionError as error:
            raise NotPermittedError(f"cannot write {path}", why=str(error.strerror), next="--record FILE") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}", why=str(error.strerror), next="--record FILE") from None

    def begin(self, begin: Begin) -> None:
        """Start a generation, or say that members or rings have come or gone: a new block."""
        if self._begin is None or self._begin.generation != begin.generation:
            self._members.clear()
        if self._begin is None or self._begin.rings != begin.rings:
            self._flags.clear()
        self._close_block()
        self._begin = begin

    def write(self, *lines: FlagsLine | MemberLine | SeenLine | EventLine) -> None:
        """Append lines, in the order of their times, and make them readable. Raises OSError when the disk is full."""
        if self._begin is None:
            raise ValueError("a recording begins with its Begin line")
        if self._pack is None:
            self._pack = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
            self._put(self._pack, (self._begin, *self._standing(lines)))
        self._put(self._pack, lines)
        for line in lines:
            if isinstance(line, FlagsLine):
                self._flags[line.ring] = line
            elif isinstance(line, MemberLine):
                self._members[line.pid] = line
        if self._size >= self._block_bytes:
            self._close_block()

    def close(self) -> None:
        """End the last block."""
        self._close_block()
        self._file.close()

    def _standing(self, coming: tuple[Line, ...]) -> list[Line]:
        """The state of everything as it stands, so that a block can be read without those before it."""
        t = next((line.t for line in coming if not isinstance(line, Begin)), 0.0)
        flags = [msgspec.structs.replace(line, t=t) for line in self._flags.values()]
        members = [msgspec.structs.replace(line, t=t) for line in self._members.values()]
        return [*flags, *members]

    def _put(self, pack: zlib._Compress, lines: Iterable[Line]) -> None:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        self._append(pack.compress(data) + pack.flush(zlib.Z_SYNC_FLUSH))

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self._size += len(data)

    def _close_block(self) -> None:
        if self._pack is None:
            return
        self._append(self._pack.flush(zlib.Z_FINISH))
        self._pack = None
        self._blocks.append(self._size)
        self._size = 0
        if sum(self._blocks) + self._block_bytes > self._max:
            self._drop_older_half()

    def _drop_older_half(self) -> None:
        """Keep the newest blocks, up to half of the bound, in a file that takes the place of the old one at once."""
        kept: list[int] = []
        for size in reversed(self._blocks):
            if kept and sum(kept) + size > self._max // 2:
                break
            kept.insert(0, size)
        beside = self._path.with_name(self._path.name + ".new")
        with self._path.open("rb") as old, beside.open("wb") as new:
            old.seek(sum(self._blocks) - sum(kept))
            while piece := old.read(_PIECE):
                new.write(piece)
        os.replace(beside, self._path)
        self._file.close()
        self._file = self._path.open("ab")
        self._blocks = kept


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """A whole recording. One that ends within a block is read up to there.

    Raises:
        BadDataError: there is no such file, or it is no recording, or one of another major version.
    """
    building: list[_Building] = []
    cut = False
    for line in _lines(path):
        if line is None:
            cut = True
        elif isinstance(line, Begin):
            if line.schema != RECORDING_SCHEMA:
                raise _bad(path, f"it says {line.schema}, this program reads {RECORDING_SCHEMA}")
            if not building or building[-1].begin.generation != line.generation:
                building.append(_Building(line))
            building[-1].go_on(line)
        elif building:
            building[-1].add(line)
        else:
            raise _bad(path, "it does not begin with a begin line")
    if not building:
        raise _bad(path, "it is empty")
    return Recording(generations=tuple(one.result() for one in building), cut=cut)


class _Building:
    """One generation while it is read."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self._tracks: dict[RecordedRing, tuple[list[float], list[bytes]]] = {}
        self._members: list[MemberLine] = []
        self._last: dict[int, MemberLine] = {}
        self._events: list[EventLine] = []
        self._times: list[float] = []

    def go_on(self, begin: Begin) -> None:
        """Read a further block."""
        self.begin = begin
        for ring in begin.rings:
            self._tracks.setdefault(ring, ([], []))

    def add(self, line: FlagsLine | MemberLine | SeenLine | EventLine) -> None:
        """Read a line; what only repeats the state at the start of a block is no change."""
        self._times = [*self._times[:1], line.t]
        if isinstance(line, FlagsLine):
            if line.ring >= len(self.begin.rings):
                return
            times, flags = self._tracks[self.begin.rings[line.ring]]
            data = bytes.fromhex(line.flags)
            if not flags or flags[-1] != data:
                times.append(line.t)
                flags.append(data)
        elif isinstance(line, MemberLine):
            before = self._last.get(line.pid)
            if before is None or (before.state, before.doing) != (line.state, line.doing):
                self._members.append(line)
            self._last[line.pid] = line
        elif isinstance(line, EventLine):
            self._events.append(line)

    def result(self) -> RecordedGeneration:
        """The generation."""
        return RecordedGeneration(
            begin=msgspec.structs.replace(self.begin, rings=tuple(self._tracks)),
            tracks=tuple(Track(ring=r, times=tuple(t), flags=tuple(f)) for r, (t, f) in self._tracks.items()),
            members=tuple(self._members),
            events=tuple(self._events),
            start_s=self._times[0] if self._times else 0.0,
            end_s=self._times[-1] if self._times else 0.0,
        )


def _lines(path: str | os.PathLike[str]) -> Iterator[Line | None]:
    """Every line; None at the end where the file ends within a block."""
    rest = b""
    for data in _unpacked(path):
        if data is None:
            yield None
            continue
        *whole, rest = (rest + data).split(b"\n")
        for text in whole:
            yield _decoded(path, text)


def _decoded(path: str | os.PathLike[str], text: bytes) -> Line:
    try:
        return LINES.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _bad(path, f"a line that is none of a recording: {error}") from None


def _unpacked(path: str | os.PathLike[str]) -> Iterator[bytes | None]:
    """The bytes of every gzip member; None at the end where the last one is not complete."""
    try:
        with Path(path).open("rb") as file:
            unpack = zlib.decompressobj(_GZIP)
            begun = False
            while piece := file.read(_PIECE):
                while piece:
                    begun = True
                    yield unpack.decompress(piece)
                    piece = unpack.unused_data
                    if unpack.eof:
                        unpack, begun = zlib.decompressobj(_GZIP), bool(piece)
            if begun:
                yield None
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from None
    except zlib.error as error:
        raise _bad(path, f"not a gzip file: {error}") from None


def _bad(path: str | os.PathLike[str], why: str) -> BadDataError:
    return BadDataError(f"{path} cannot be read as a recording", why=why, next="vllmdiag watch --record FILE")

"""The flag bytes of ring segments: polled over the window, with pread on a read-only descriptor.

Never mmap: touching a hole of a tmpfs file through a mapping allocates the page. A pread of 30 bytes costs 1.5 us.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.shm import Segment, SlotHeads, TailState
from vllmdiag.vllm.footprint import flag_bytes

from . import procfs

MAX_STATES = 4000
"""States kept of one ring: the first ones and the very last; the others are counted."""

_TRIES = 5
_HEAD = 7


def open_segment(segment: Segment, root: str = "/") -> int:
    """A read-only descriptor of the very file: through a holder's descriptor, or by name in a holder's file system.

    Raises:
        OSError: no way leads to it (any more).
    """
    by_fd = [procfs.proc(root, holder.pid, "fd", fd) for holder in segment.holders for fd in holder.fds[:1]]
    by_name = [procfs.proc(root, holder.pid, "root", segment.path.lstrip("/")) for holder in segment.holders]
    *others, last = [*by_fd, *by_name, os.path.join(root, segment.path.lstrip("/"))]
    for path in others:
        with contextlib.suppress(OSError):
            return _open_same(path, segment.key)
    return _open_same(last, segment.key)


def read_heads(segment: Segment, geometries: Iterable[tuple[int, int]], root: str = "/") -> tuple[SlotHeads, ...]:
    """The first 7 bytes of every slot, under each assumed (chunks, bytes of a chunk). Raises OSError."""
    fd = open_segment(segment, root)
    try:
        return tuple(
            SlotHeads(
                chunks=chunks,
                chunk_bytes=size,
                heads=tuple(os.pread(fd, min(_HEAD, size), slot * size) for slot in range(chunks)),
            )
            for chunks, size in geometries
        )
    finally:
        os.close(fd)


def read_slot(segment: Segment, chunk_bytes: int, slot: int, *, limit: int = 4096, root: str = "/") -> bytes:
    """The first bytes of one slot: payload, which may hold prompts, so it is for looking at and never for keeping.

    Raises OSError.
    """
    fd = open_segment(segment, root)
    try:
        return os.pread(fd, min(limit, chunk_bytes), slot * chunk_bytes)
    finally:
        os.close(fd)


class RingPoller:
    """A thread that reads the flags of every candidate segment `hz` times a second, and keeps each change once.

    Args:
        segments: all segments; those whose size cannot be a ring are returned as they are.
        root: where the tree with ``proc`` is.
        hz: sweeps per second.
        clock: seconds; the times of states count from the call of `start`, or from `t0` on this clock.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        root: str = "/",
        *,
        hz: float = 1000,
        t0: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._period_s = 1 / hz
        self._clock = clock
        self._t0 = t0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ring-poller", daemon=True)
        self._tracks = [_Track(segment, root) for segment in segments]
        self._started = self._stopped = 0.0

    def start(self) -> RingPoller:
        """Begin to poll."""
        self._started = self._clock()
        if self._t0 is None:
            self._t0 = self._started
        self._thread.start()
        return self

    def stop(self) -> list[Segment]:
        """End the polling; the segments in the order given, with their states."""
        self._stop.set()
        self._thread.join()
        return [track.result(self._stopped - self._started) for track in self._tracks]

    def _run(self) -> None:
        live = [track for track in self._tracks if track.fd is not None]
        t0 = self._t0 or 0.0
        try:
            while True:
                t = self._clock() - t0
                for track in live:
                    track.poll(t)
                if self._stop.is_set():
                    break
                time.sleep(self._period_s)
        finally:
            self._stopped = self._clock()
            for track in live:
                track.close()


class _Track:
    """One segment under observation."""

    def __init__(self, segment: Segment, root: str, max_states: int = MAX_STATES) -> None:
        self._segment = segment
        self._max_states = max_states
        self._tail_bytes = flag_bytes(segment.size)
        self._offset = segment.size - self._tail_bytes
        self._states: list[TailState] = []
        self._last = b""
        self._dropped = 0
        self._polls = 0
        self._hole: Missing | None = None
        self.fd: int | None = None
        if self._tail_bytes:
            try:
                self.fd = open_segment(segment, root)
            except OSError as error:
                self._hole = procfs.missing(f"flags of {segment.path}", error)

    def poll(self, t: float) -> None:
        """Read the flags once; most often they are what they were."""
        try:
            self._look(t)
        except OSError as error:  # a file system that gives up, not a process that ends
            self._hole = procfs.missing(f"flags of {self._segment.path}", error)
            self.close()

    def _look(self, t: float) -> None:
        if self.fd is None:
            return
        tail = os.pread(self.fd, self._tail_bytes, self._offset)
        self._polls += 1
        if tail != self._last:
            # A row may be torn by the writer's next step: believe what two reads agree on.
            for _ in range(_TRIES):
                again = os.pread(self.fd, self._tail_bytes, self._offset)
                if again == tail:
                    break
                tail = again
            if tail != self._last and len(tail) == self._tail_bytes:  # shorter: somebody has truncated the file
                self._keep(t, tail)

    def _keep(self, t: float, tail: bytes) -> None:
        self._last = tail
        state = TailState(t=t, tail=tail)
        if len(self._states) < self._max_states:
            self._states.append(state)
        else:
            self._states[-1] = state
            self._dropped += 1

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def result(self, polled_s: float) -> Segment:
        if not self._tail_bytes:
            return self._segment
        return msgspec.structs.replace(
            self._segment,
            tail_bytes=self._tail_bytes,
            polls=self._polls,
            polled_s=polled_s if self._polls else 0.0,
            states=tuple(self._states),
            states_dropped=self._dropped,
            missing=self._segment.missing + ((self._hole,) if self._hole else ()),
        )


def _open_same(path: str, key: tuple[int, int]) -> int:
    # O_PATH first: it opens nothing, so a fifo or device that took the place of the file cannot block or be disturbed.
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        seen = os.fstat(handle)
        if (seen.st_dev, seen.st_ino) != key or not stat.S_ISREG(seen.st_mode):
            raise FileNotFoundError(2, "another file is there now")
        here = f"/proc/self/fd/{handle}"
        with contextlib.suppress(PermissionError):  # only the owner may leave the access time alone
            return os.open(here, os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
        return os.open(here, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)

"""Rounds: rings at up to 100 Hz and process states a few times a second, joined to the last close look.

A round is a `Snapshot` like any other, to be judged and shown as any other. What changes slowly or costs much (stacks,
sockets, titles) is that of the last look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from vllmdiag.model.process import Process, ProcessSample
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import LogLine, Snapshot
from vllmdiag.sources import proc
from vllmdiag.sources.log_follow import LogFollower
from vllmdiag.sources.rings import RingPoller
from vllmdiag.sources.window import now

_STATES_A_ROUND = 4
_LOG_EVERY = 2
"""Rounds between two looks at the logs."""


class Sampler:
    """Samples one instance, round by round.

    Args:
        base: a close look at it.
        hz: how often the flags are read.
        logs: files to follow beside those that the members write.
        root: where the tree with ``proc`` is.
    """

    def __init__(self, base: Snapshot, hz: float, logs: Iterable[str] = (), root: str = "/") -> None:
        self._hz, self._root = hz, root
        self._base = base
        self._mine: set[int] = set()
        self._segments: tuple[Segment, ...] = ()
        self._rounds = 0
        self.rebase(base)
        self._log = LogFollower((p for p in base.processes if p.pid in self._mine), logs, root)

    def rebase(self, base: Snapshot) -> None:
        """Go on from a newer close look."""
        self._base = base
        self._mine = set(base.target_pids)
        self._segments = tuple(
            msgspec.structs.replace(s, states=(), heads=(), missing=())
            for s in base.segments
            if any(holder.pid in self._mine for holder in s.holders)
        )

    def round(self, seconds: float, pause: Callable[[float], object]) -> Snapshot:
        """One round.

        Args:
            seconds: how long it lasts.
            pause: waits; it may return early, and the round is shorter then.
        """
        members = [p for p in self._base.processes if p.pid in self._mine]
        poller = RingPoller(self._segments, self._root, hz=self._hz).start()
        try:
            samples: dict[int, list[ProcessSample]] = {p.pid: [] for p in members}
            for i in range(_STATES_A_ROUND + 1):
                if i:
                    pause(seconds / _STATES_A_ROUND)
                for p in members:
                    samples[p.pid].append(proc.sample(p.pid, p.starttime, i * seconds / _STATES_A_ROUND, self._root))
        finally:
            segments = poller.stop()
        self._rounds += 1
        return msgspec.structs.replace(
            self._base,
            observed_at=now(),
            window_s=seconds,
            processes=tuple(self._with_samples(p, samples) for p in self._base.processes),
            segments=tuple(segments),
            metrics=(),
            log_lines=self._log_lines(),
            missing=(),
            costs=(),
        )

    def _with_samples(self, process: Process, samples: dict[int, list[ProcessSample]]) -> Process:
        if process.pid not in samples:
            return process
        return msgspec.structs.replace(process, samples=tuple(samples[process.pid]), threads=())

    def _log_lines(self) -> tuple[LogLine, ...]:
        return self._log.lines() if self._rounds % _LOG_EVERY == 0 else ()

"""Bundles that `watch` captures: written, kept to a number, and told to a command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllmdiag.bundle.pack import pack, save
from vllmdiag.bundle.redact import Redactor
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.snapshot import Snapshot

_PREFIX = "vllmdiag-watch-"
_PATIENCE_S = 600.0
"""A command that takes longer is ended."""


class Evidence:
    """The directory of bundles.

    Args:
        directory: where they go.
        keep: how many of ours stay there; the oldest go.
        redactor: replaces what must not leave the host.
    """

    def __init__(self, directory: Path, keep: int, redactor: Redactor | None) -> None:
        self._directory, self._keep, self._redactor = directory, keep, redactor

    def capture(self, snapshots: Sequence[Snapshot], cause: str) -> str:
        """Write a bundle and return its path.

        Args:
            snapshots: oldest first; the last one is judged.
            cause: goes into the name.

        Raises:
            VllmdiagError: it cannot be written.
        """
        stamp = "".join(c for c in snapshots[-1].observed_at if c.isdigit() or c in "TZ")
        path = str(self._directory / f"{_PREFIX}{stamp}-{cause}.tar.gz")
        save(pack(snapshots, self._redactor), path, force=True)
        self._prune()
        return path

    def _prune(self) -> None:
        # The time stands in the name, behind the prefix: by name is by time.
        mine = sorted(self._directory.glob(f"{_PREFIX}*.tar.gz"))
        for old in mine[: -self._keep]:
            with contextlib.suppress(OSError):
                old.unlink()


class Commands:
    """The runs of ``--on-stall``: started, not waited for, ended when they take too long or when `watch` ends."""

    def __init__(self, command: str | None) -> None:
        self._command = command
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []

    def start(self, bundle: str, diagnosis: Diagnosis) -> None:
        """Run the command for a bundle. Raises OSError when no shell can be started."""
        if self._command is None:
            return
        # Its output goes where our notes go: stdout is for events.
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            env={**os.environ, **_told(bundle, diagnosis)},
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        self._running.append((process, time.monotonic()))

    def ended(self) -> list[int]:
        """Exit codes of those that have ended since the last call."""
        codes = []
        for process, began in list(self._running):
            if process.poll() is None and time.monotonic() - began > _PATIENCE_S:
                self._end(process)
            if process.poll() is not None:
                self._running.remove((process, began))
                codes.append(process.returncode)
        return codes

    def close(self) -> None:
        """End those that still run."""
        for process, _ in self._running:
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _told(bundle: str, diagnosis: Diagnosis) -> Mapping[str, str]:
    verdict = diagnosis.verdict
    return {
        "VLLMDIAG_BUNDLE": bundle,
        "VLLMDIAG_CAUSE": verdict.cause,
        "VLLMDIAG_SUBJECT": verdict.subject.label,
        "VLLMDIAG_PID": str(verdict.subject.pid or ""),
        "VLLMDIAG_SUMMARY": verdict.summary,
    }

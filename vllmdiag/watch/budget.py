"""A budget of CPU: watching costs the machine little, whatever happens on it."""

from __future__ import annotations

import os
import time

_BURST_S = 1.0
"""Seconds of CPU that may be saved up for when something happens."""


class Budget:
    """Spends at most a share of one core, over time.

    Args:
        share: e.g. 0.03 for 3 % of one core.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = _BURST_S
        self._at = time.monotonic()

    def allows(self) -> bool:
        """There is something left to spend."""
        now = time.monotonic()
        self._saved = min(_BURST_S, self._saved + (now - self._at) * self._share)
        self._at = now
        return self._saved > 0

    def spend(self, cpu_s: float) -> None:
        """Take what was used, also beyond what is left: an urgent look is never refused, the next ones wait for it."""
        self._saved -= cpu_s


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system

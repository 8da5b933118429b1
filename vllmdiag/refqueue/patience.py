"""The clock of one wait: how long is left, and when to say that it takes long."""

from __future__ import annotations

import logging
import math
import time

from .errors import QueueTimeoutError

logger = logging.getLogger("vllmdiag.refqueue")

LONG_WAIT = "No available shared memory broadcast block found in %d seconds."
"""vLLM's words, so that what reads vLLM's log reads this one."""


class Patience:
    """Started when the wait begins.

    Args:
        what: is waited for, e.g. ``no message``, as the error says it.
        timeout_s: None waits for ever.
        warn_every_s: log the wait each time that it has lasted this long again; None never does.
    """

    def __init__(self, what: str, timeout_s: float | None, warn_every_s: float | None = None) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline = math.inf if timeout_s is None else self._began + timeout_s
        self._warn_every_s = warn_every_s
        self._warn_at = math.inf if warn_every_s is None else self._began + warn_every_s

    def left_ms(self, at_most_s: float | None = None) -> int | None:
        """Milliseconds that one sleep may last, None for ever: up to the deadline, the next warning and `at_most_s`.

        Raises:
            QueueTimeoutError: the deadline has passed.
        """
        now = time.monotonic()
        if now >= self._deadline:
            raise QueueTimeoutError(f"{self._what} within {self._timeout_s:g} s")
        if now >= self._warn_at and self._warn_every_s:
            logger.info(LONG_WAIT, self._warn_every_s)
            self._warn_at += self._warn_every_s
        left = min(self._deadline - now, self._warn_at - now, math.inf if at_most_s is None else at_most_s)
        return None if left == math.inf else math.ceil(left * 1000)

"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(what: str, condition: Callable[[], T], deadline_s: float = 60.0, every_s: float = 0.1) -> T:
    """Poll until `condition` answers with something true and return that.

    Raises:
        TimeoutError: it did not within `deadline_s`; the message says `what`.
    """
    end = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline_s:g} s still not: {what}")
        time.sleep(every_s)

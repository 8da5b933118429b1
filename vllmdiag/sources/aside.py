"""Work beside the main thread: its exception is not lost, and it ends when the whole look ends."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Aside:
    """A thread that runs `work`.

    It is a daemon: one that hangs in the kernel must not keep the program from ending.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vllmdiag", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits for the result
            self._error = error

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end; raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self, patience_s: float) -> None:
        """Wait at most so long, and raise nothing: the result is not wanted any more."""
        self._thread.join(patience_s)

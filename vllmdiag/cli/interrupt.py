"""Ctrl-C ends the program, whatever Python is doing when it comes."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

_AGAIN_S = 0.7
"""Longer than it takes to clean up after the first one."""


def install() -> None:
    """Raise a second KeyboardInterrupt where the first was lost.

    Python drops an exception that is raised within a callback of its own (a destructor, the end of an import) and
    prints a traceback instead. Where the interrupt is ignored, as in the background of a shell, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGALRM, _raise)
    signal.signal(signal.SIGINT, _raise_and_wind)
    report = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else report(lost)


def settle() -> None:
    """It has arrived: no second one."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _raise(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _raise_and_wind(_signal: int, _frame: FrameType | None) -> NoReturn:
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise KeyboardInterrupt

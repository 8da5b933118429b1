"""Switches: files by which a fault is turned on inside a process of the miniature, and by which it says that it is in.

A switch is a file in the lab's directory. Its text says for whom it is meant (a rank, say); empty means everybody.
"""

from __future__ import annotations

import time
from pathlib import Path

from . import lifeline

_PERIOD_S = 0.2
_SPINS = 3_000_000
"""So many turns between two looks that a stack hardly ever shows the look."""


def _directory(work: Path | None) -> Path:
    return (work or lifeline.work_directory()) / "switches"


def turn_on(name: str, whom: str = "", work: Path | None = None) -> None:
    """Turn a switch on for everybody, or for `whom`."""
    _directory(work).mkdir(exist_ok=True)
    (_directory(work) / name).write_text(whom)


def turn_off(name: str, work: Path | None = None) -> None:
    """Turn it off."""
    (_directory(work) / name).unlink(missing_ok=True)


def is_on(name: str, me: str = "", work: Path | None = None) -> bool:
    """Whether it is on for `me`."""
    try:
        whom = (_directory(work) / name).read_text()
    except FileNotFoundError:
        return False
    return whom in ("", me)


def _lasts(name: str) -> bool:
    """Whether it is on for anybody."""
    return (_directory(None) / name).exists()


def entered(name: str) -> None:
    """Say that a fault has been entered; whoever injects it waits for this."""
    turn_on(f"{name}.entered")


def has_been_entered(name: str, work: Path) -> bool:
    """Whether somebody said so."""
    return is_on(f"{name}.entered", work=work)


def sleep_while_on(name: str) -> None:
    """Enter a fault and stay in it, asleep, until its switch is turned off."""
    entered(name)
    while _lasts(name):
        time.sleep(_PERIOD_S)


def spin_while_on(name: str) -> None:
    """Enter a fault and stay in it, on the CPU, until its switch is turned off."""
    entered(name)
    while _lasts(name):
        for _ in range(_SPINS):
            pass

"""Errors that teach: what went wrong, why, what to do next, and the exit code that scripts see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb: 0-3 as Nagios plug-ins, 64 and up as sysexits.h."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3
    USAGE = 64
    BAD_DATA = 65
    NO_TARGET = 66
    NO_HELPER = 69
    BUG = 70
    TIMED_OUT = 75
    NOT_PERMITTED = 77
    INTERRUPTED = 130


class VllmdiagError(Exception):
    """An error the user can act on.

    Attributes:
        what: one line, what could not be done.
        why: the reason, as exact as it is known.
        next: the one thing to try.
        exit_code: what the process returns.
    """

    exit_code = ExitCode.BUG

    def __init__(self, what: str, *, why: str = "", next: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next


class UsageError(VllmdiagError):
    """The command line does not make sense."""

    exit_code = ExitCode.USAGE


class BadDataError(VllmdiagError):
    """A file given as evidence cannot be read as what it should be."""

    exit_code = ExitCode.BAD_DATA


class TargetError(VllmdiagError):
    """No such instance, or several where one must be chosen."""

    exit_code = ExitCode.NO_TARGET


class HelperMissingError(VllmdiagError):
    """A program that the verb cannot do without is not installed."""

    exit_code = ExitCode.NO_HELPER


class NotPermittedError(VllmdiagError):
    """The kernel refuses, and without it the verb has nothing to show."""

    exit_code = ExitCode.NOT_PERMITTED


class TimedOutError(VllmdiagError):
    """The deadline of the whole run passed."""

    exit_code = ExitCode.TIMED_OUT

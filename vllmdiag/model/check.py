"""The result of `check`: a diagnosis measured against a profile, expectations and what is known. Pure values."""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Fact
from .diagnosis import Diagnosis, Finding, Severity, Status

CHECK_SCHEMA = "vllmdiag.check/1"
BASELINE_SCHEMA = "vllmdiag.baseline/1"

Profile = Literal["liveness", "readiness", "ci", "full"]
"""What is asked.

``liveness``: would a restart help? Only a proven stall, a dead or a stopped process says yes; a start-up is alive.
``readiness``: does it serve? Not before it listens and answers, and not with a fault.
``ci``: is all as it should be? Warnings count, and so does every expectation.
``full``: the verdict of `diagnose`.
"""


class Expectation(Fact, frozen=True, kw_only=True):
    """One thing that was expected of the instance."""

    name: str
    """``tp``, ``ready``, ``ring`` ..."""
    wanted: str
    found: str
    """In words; ``not known`` where it could not be observed."""
    met: bool


class SetAside(Fact, frozen=True, kw_only=True):
    """A finding that was seen and does not count."""

    cause: str
    layer: int
    severity: Severity
    subject: str
    summary: str
    why: str
    """``ignored``, ``known`` (in the baseline), ``not for this profile``, or why in words."""


class Measure(Fact, frozen=True, kw_only=True):
    """One number of the look."""

    name: str
    """In the form of a metric name, without a prefix: ``ring_messages_per_second``."""
    value: float
    help: str
    unit: str = ""
    """``s``, ``B``, or empty."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class CheckResult(Fact, frozen=True, kw_only=True):
    """One check."""

    schema: str = CHECK_SCHEMA
    profile: Profile
    status: Status
    exit_code: int
    """0 where the status is below what fails (``--fail-on``)."""
    fail_on: Status = "warning"
    summary: str = ""
    """One line, without the status."""
    looks: int = 1
    """2 where a fault was looked at again before it was believed."""
    counted: tuple[Finding, ...] = ()
    """The findings behind the status, the worst first."""
    set_aside: tuple[SetAside, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    measures: tuple[Measure, ...] = ()
    diagnosis: Diagnosis


class Known(Fact, frozen=True, kw_only=True):
    """A finding that is no news."""

    cause: str
    subject: str
    """Label, e.g. ``Worker_TP1``: it outlives a restart, a pid does not."""
    summary: str = ""
    """As it was when it was written down; for the reader of the file."""


class Baseline(Fact, frozen=True, kw_only=True):
    """What was known of an instance when the baseline was written."""

    schema: str = BASELINE_SCHEMA
    written_at: str = ""
    known: tuple[Known, ...] = ()

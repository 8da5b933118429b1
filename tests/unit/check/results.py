"""Checks of the hand-made diagnoses, to be written in every form."""

from __future__ import annotations

import msgspec

from tests.unit.render import samples
from vllmdiag.diagnosis.expectations import compare, parse
from vllmdiag.diagnosis.measures import measures_of
from vllmdiag.diagnosis.profiles import Rule, judge
from vllmdiag.model.check import CheckResult
from vllmdiag.model.diagnosis import Diagnosis


def of(diagnosis: Diagnosis, rule: Rule | None = None, *expect: str) -> CheckResult:
    """A diagnosis of the samples, with the view of the samples behind it."""
    view = samples.instance()
    return judge(
        diagnosis,
        rule or Rule(),
        expectations=compare(parse(expect), view, diagnosis),
        measures=measures_of(diagnosis, view),
    )


def fault() -> CheckResult:
    """A stopped worker, and an expectation that is not met."""
    base = samples.critical()
    root = msgspec.structs.replace(base.findings[0], next=base.verdict.next)
    return of(
        msgspec.structs.replace(base, findings=(root, *base.findings[1:])), Rule(profile="ci"), "workers=4,health"
    )


def fine() -> CheckResult:
    """All is well."""
    return of(samples.idle(), Rule(profile="liveness"))


def set_aside() -> CheckResult:
    """A warning that is ignored."""
    base = samples.warning()
    return of(base, Rule(ignored=tuple((f.cause, "") for f in base.findings)))


def unknown() -> CheckResult:
    """Too little was seen."""
    return of(samples.unknown())


def hostile() -> CheckResult:
    """Names and evidence that try to break out of the form."""
    base = samples.critical()
    nasty = 'a|b\n::error::gotcha %0A, "quoted" <tag> & \x1b[31mred\x00'
    finding = msgspec.structs.replace(
        base.findings[0],
        summary=nasty,
        evidence=(nasty,),
        subject=msgspec.structs.replace(base.findings[0].subject, label=nasty),
    )
    return of(msgspec.structs.replace(base, findings=(finding,)))

"""What counts for whom: a diagnosis judged for a probe that restarts, one that routes, or a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllmdiag.model.check import Baseline, CheckResult, Expectation, Known, Measure, Profile, SetAside
from vllmdiag.model.diagnosis import Diagnosis, Finding, Severity, Status

_RANK: dict[Status, int] = {"ok": 0, "warning": 1, "unknown": 2, "critical": 3}
_EXIT: dict[Status, int] = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}
_OF_SEVERITY: dict[Severity, Status] = {"info": "ok", "warning": "warning", "critical": "critical"}
_FAIL_ON: dict[Profile, Status] = {"liveness": "critical", "readiness": "warning", "ci": "warning", "full": "warning"}

_STARTUP_LAYER = 2
_SERVING_FAULTS = ("endpoint-gone", "zmq-io-silent")
"""Causes of the handshake layer that befall a server that serves; the others of it are of a start-up: that is alive."""
_NO_RESTART = {
    "unknown": "what cannot be named is no reason to restart",
    "wait-remote-kv": "another instance keeps it waiting: a restart here changes nothing",
    "fd-exhausted": "those who are connected are served",
    "pids-limit": "what runs goes on",
    "shm-too-small": "a restart meets the same /dev/shm",
    "shm-exhausted": "a restart meets the same /dev/shm",
}
"""Critical, but no proof that the server stands still, or nothing that a restart would change."""
_FACTS = ("process-stopped", "worker-dead", "engine-dead", "orphan-engine", "driver-unkillable")
"""States that the kernel tells: one look proves them. What is inferred from a lack of motion is looked at twice."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks of a check."""

    profile: Profile = "full"
    fail_on: Status | None = None
    """None: as the profile needs."""
    ignored: tuple[tuple[str, str], ...] = ()
    """(cause, label or pid of its subject; empty for any)."""
    baseline: Baseline = Baseline()


def judge(
    diagnosis: Diagnosis,
    rule: Rule,
    *,
    expectations: Sequence[Expectation] = (),
    measures: Sequence[Measure] = (),
    before: CheckResult | None = None,
) -> CheckResult:
    """Say what a diagnosis means under a rule.

    Args:
        diagnosis: of one window.
        rule: profile, what fails, what is no news.
        expectations: already compared with what was found.
        measures: numbers to pass on.
        before: the result of a first look, where this one is to confirm it: a critical finding that is inferred counts
            only where both have it.
    """
    roots = [f for f in diagnosis.findings if f.folded_into is None and f.severity != "info"]
    reasons = [(f, _why_not(f, rule) or _why_not_again(f, before)) for f in roots]
    counted = tuple(f for f, why in reasons if not why)
    aside = tuple(
        SetAside(cause=f.cause, layer=f.layer, severity=f.severity, subject=f.subject.label, summary=f.summary, why=why)
        for f, why in reasons
        if why
    )
    unmet = [e for e in expectations if not e.met]
    status = "critical" if unmet else _status(diagnosis, rule, counted)
    fail_on = rule.fail_on or _FAIL_ON[rule.profile]
    return CheckResult(
        profile=rule.profile,
        status=status,
        exit_code=_EXIT[status] if _RANK[status] >= _RANK[fail_on] else 0,
        fail_on=fail_on,
        summary=_summary(diagnosis, counted, aside, unmet),
        looks=1 if before is None else 2,
        counted=counted,
        set_aside=aside,
        expectations=tuple(expectations),
        measures=tuple(measures),
        diagnosis=diagnosis,
    )


def needs_second_look(result: CheckResult) -> bool:
    """A critical finding that is inferred, not read off: it must show in a second window too before it counts."""
    return result.profile != "full" and any(_inferred(f) for f in result.counted)


def hopeless(result: CheckResult) -> bool:
    """Waiting longer makes no sense: a member has died or was stopped."""
    return any(f.cause in _FACTS for f in result.diagnosis.findings if f.folded_into is None)


def baseline_of(diagnosis: Diagnosis) -> Baseline:
    """Everything that is found now, to be no news from now on."""
    roots = [f for f in diagnosis.findings if f.folded_into is None and f.severity != "info"]
    known = (Known(cause=f.cause, subject=f.subject.label, summary=f.summary) for f in roots)
    return Baseline(written_at=diagnosis.observed_at, known=tuple(dict.fromkeys(known)))


def _why_not(finding: Finding, rule: Rule) -> str:
    """Why a finding does not count; empty where it does."""
    names = {"", finding.subject.label, str(finding.subject.pid)}
    if any(cause == finding.cause and subject in names for cause, subject in rule.ignored):
        return "ignored"
    if any(k.cause == finding.cause and k.subject == finding.subject.label for k in rule.baseline.known):
        return "known"
    if rule.profile == "liveness":
        return _why_alive(finding)
    if rule.profile == "readiness" and finding.severity != "critical":
        return "not for this profile"
    return ""


def _why_not_again(finding: Finding, before: CheckResult | None) -> str:
    if before is None or not _inferred(finding):
        return ""
    same = {(f.cause, f.subject.pid) for f in before.counted}
    return "" if (finding.cause, finding.subject.pid) in same else "seen in one look of two"


def _inferred(finding: Finding) -> bool:
    return finding.severity == "critical" and finding.cause not in _FACTS


def _why_alive(finding: Finding) -> str:
    """Why a finding is no reason to restart; empty where it is one."""
    if finding.severity != "critical":
        return "not for this profile"
    if finding.cause in _NO_RESTART:
        return _NO_RESTART[finding.cause]
    if finding.layer == _STARTUP_LAYER and finding.cause not in _SERVING_FAULTS:
        return "a start-up is alive"
    if finding.confidence == "low":
        return "not proven"
    return ""


def _status(diagnosis: Diagnosis, rule: Rule, counted: Sequence[Finding]) -> Status:
    if counted:
        return max((_OF_SEVERITY[f.severity] for f in counted), key=_RANK.__getitem__)
    verdict = diagnosis.verdict
    if rule.profile == "liveness":
        return "unknown" if verdict.status == "unknown" else "ok"
    if rule.profile in ("readiness", "ci") and verdict.cause == "starting":
        return "warning"
    return "unknown" if verdict.status == "unknown" else "ok"


def _summary(
    diagnosis: Diagnosis, counted: Sequence[Finding], aside: Sequence[SetAside], unmet: Sequence[Expectation]
) -> str:
    words = [f"expected {e.name} {e.wanted}, found {e.found}" for e in unmet]
    if counted:
        root = counted[0]
        words.append(f"{root.cause}: {root.summary}")
        words += [f"and {len(counted) - 1} more"] if len(counted) > 1 else []
    elif diagnosis.verdict.layer == 0 or not aside:
        words.append(f"{diagnosis.verdict.cause}: {diagnosis.verdict.summary}")
    words += [f"{s.cause} ({s.why})" for s in aside[:3]]
    return "; ".join(words)

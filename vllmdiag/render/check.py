"""`check` for people and for probes: one line that holds the verdict; more only where more is asked for."""

from __future__ import annotations

from vllmdiag.model.check import CheckResult
from vllmdiag.model.diagnosis import Status

from .page import Page, Role, Span, Style
from .parts import could_not_observe
from .words import plural

_ROLE: dict[Status, Role] = {"ok": "good", "warning": "warn", "critical": "bad", "unknown": "warn"}


def check_text(result: CheckResult, style: Style) -> str:
    """Write a check: one line (a probe shows it in its events), with -v also evidence and what was set aside."""
    page = Page(style)
    page.line(Span(result.status.upper(), _ROLE[result.status]), "  ", result.summary, f"  ({_how(result)})")
    if not style.verbose:
        return page.text()
    for expectation in result.expectations:
        mark, role = ("✓ ", "good") if expectation.met else ("✗ ", "bad")
        found = "" if expectation.met else f", found {expectation.found}"
        page.line(Span(mark, role), f"{expectation.name} {expectation.wanted}{found}", indent=2, hang=4)  # type: ignore[arg-type]
    for finding in result.counted:
        for fact in finding.evidence:
            page.line(Span("evidence  ", "dim"), fact, indent=2, hang=12)
        for step in finding.next:
            page.line(Span("next      ", "dim"), Span(step.command, "head", whole=True), indent=2, hang=12)
    for aside in result.set_aside:
        page.line(Span("set aside ", "dim"), f"{aside.cause} of {aside.subject}: {aside.why}", indent=2, hang=12)
    could_not_observe(page, result.diagnosis.missing)
    return page.text()


def _how(result: CheckResult) -> str:
    facts = [result.profile, f"{result.diagnosis.window_s:.1f} s"]
    facts += [plural(result.looks, "look")] if result.looks > 1 else []
    facts += ["does not fail it"] if result.status != "ok" and result.exit_code == 0 else []
    return ", ".join(facts)

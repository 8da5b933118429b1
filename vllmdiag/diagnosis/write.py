"""How a finding is written: the words of the catalogue with the pids of this instance filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllmdiag.catalogue.entries import cause
from vllmdiag.model.diagnosis import Confidence, Finding, Link, NextStep, Severity, Subject


def finding(  # noqa: PLR0913  one keyword for each field of a Finding
    slug: str,
    who: Subject,
    summary: str,
    *,
    evidence: Sequence[str] = (),
    chain: Sequence[Link] = (),
    confidence: Confidence = "high",
    severity: Severity | None = None,
    layer: int | None = None,
    since_s: float | None = None,
    words: Mapping[str, str] | None = None,
) -> Finding:
    """A finding of a cause of the catalogue; `words` fill the placeholders of its next steps."""
    entry = cause(slug)
    pid = str(who.pid) if who.pid is not None else "PID"
    filled = {"pid": pid, "target": pid, **(words or {})}
    graded: Severity = severity or ("info" if entry.severity == "ok" else entry.severity)
    return Finding(
        cause=slug,
        layer=entry.layer if layer is None else layer,
        severity=graded,
        confidence=confidence,
        subject=who,
        summary=summary,
        evidence=tuple(evidence),
        chain=tuple(chain),
        next=tuple(NextStep(command=_fill(s.command, filled), why=s.why, risk=s.risk) for s in entry.next),
        since_s=since_s,
    )


def _fill(text: str, words: Mapping[str, str]) -> str:
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    return text

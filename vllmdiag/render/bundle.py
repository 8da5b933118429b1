"""What `capture` says of the file that it wrote, or would write."""

from __future__ import annotations

from vllmdiag.model.bundle import Estimate, Manifest

from .page import Page, Span, Style
from .words import duration, size

_KEY_WORDS = {
    "host": "redacted, with the tokens of this host",
    "ephemeral": "redacted, with tokens of its own",
    "none": "NOT redacted",
}


def bundle_text(manifest: Manifest, path: str, n_bytes: int, style: Style) -> str:
    """Where it is, what it says, and what to do with it."""
    page = Page(style)
    last = manifest.snapshots[-1]
    page.line(Span("wrote ", "head"), Span(path, "head", whole=True), f" · {size(n_bytes)}")
    page.line(f"verdict   {last.status}: {last.cause} · {last.summary}", indent=2, hang=12)
    count = len(manifest.snapshots)
    page.line(f"holds     {count} snapshot{'s' if count > 1 else ''}, {len(manifest.files)} files", indent=2, hang=12)
    redaction = manifest.redaction
    page.line("privacy   ", Span(_KEY_WORDS[redaction.key], "plain" if redaction.redacted else "warn"), indent=2)
    if manifest.missing:
        page.line(f"missing   {len(manifest.missing)} facts, named in manifest.json", indent=2, hang=12)
    page.line(Span("next      ", "dim"), Span(f"vllmdiag diagnose --from {path}", whole=True), indent=2)
    if style.verbose:
        page.section("files")
        rows = [[file.name, size(file.size), file.about] for file in manifest.files]
        page.table(rows, header=("file", "size", "what"), indent=2, right=(1,))
    if style.verbose and count > 1:
        page.section("snapshots")
        moments = [[moment.observed_at, moment.status, moment.cause, moment.summary] for moment in manifest.snapshots]
        page.table(moments, header=("at", "status", "cause", "what"), indent=2)
    return page.text()


def estimate_text(estimate: Estimate, style: Style) -> str:
    """One line."""
    page = Page(style)
    page.line(
        f"about {size(estimate.size)} and {duration(estimate.seconds)}: {estimate.snapshots}"
        f" snapshot{'s' if estimate.snapshots > 1 else ''} of {estimate.processes} processes; nothing was done"
    )
    return page.text()

"""Playbooks on a page: the list, one of them, those that fit a symptom, and what a cause or a term means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllmdiag.catalogue.playbooks import found_in
from vllmdiag.model.diagnosis import LAYER_NAMES, Diagnosis
from vllmdiag.model.playbook import Explanation, KnownLine, PlaybookDocument

from . import markdown
from .page import Page, Role, Span, Style
from .words import duration

_ROLES: dict[str, Role] = {"ok": "good", "info": "plain", "warning": "warn", "critical": "bad"}


def list_text(books: Iterable[PlaybookDocument], style: Style) -> str:
    """All playbooks, layer by layer."""
    page = Page(style)
    rows = [
        (str(book.layer), Span(book.severity, _ROLES.get(book.severity, "plain")), Span(book.cause, "head"), book.title)
        for book in books
    ]
    page.table(rows, header=("layer", "severity", "cause", "title"))
    page.gap()
    page.line("one of them: ", Span("vllmdiag playbook show CAUSE", "head", whole=True))
    return page.text()


def playbook_text(book: PlaybookDocument, diagnosis: Diagnosis | None, style: Style) -> str:
    """One playbook.

    Args:
        book: its text has the pids filled in already.
        diagnosis: where the pids came from, to be named; None where they are placeholders.
        style: how the page is written.
    """
    page = Page(style)
    page.line(
        Span(book.severity.upper(), _ROLES.get(book.severity, "plain")),
        "  ",
        Span(f"layer {book.layer} {LAYER_NAMES[book.layer]} · {book.title}", "head"),
    )
    facts = [("cause", book.cause), ("versions", book.versions), ("needs", book.evidence)]
    if diagnosis is not None:
        facts.append(("pids of", origin(book, diagnosis)))
    for key, fact in facts:
        page.line(Span(key.ljust(10), "dim"), fact, indent=2, hang=12)
    markdown.write(page, book.text)
    if book.reports:
        page.section("Reports")
        for report in book.reports:
            page.line(Span(report, whole=True), indent=2)
    return page.text()


def origin(book: PlaybookDocument, diagnosis: Diagnosis) -> str:
    """Which diagnosis the pids are of, and whether it found this cause."""
    when = f"the diagnosis of {diagnosis.observed_at}" if diagnosis.observed_at else "the diagnosis"
    found = found_in(diagnosis, book.cause)
    if found is None:
        return f"{when}, which does not find this cause but {diagnosis.verdict.cause}"
    since = f", for at least {duration(found.since_s)}" if found.since_s is not None else ""
    return f"{when}: {found.summary}{since}"


def matches_text(books: Sequence[PlaybookDocument], lines: Sequence[KnownLine], style: Style) -> str:
    """The playbooks that fit a symptom, and what the known lines in it mean."""
    page = Page(style)
    best = [book for book in books if book.score == books[0].score]
    if not best:
        page.line(Span("no playbook fits this text", "head"))
    elif len(best) == 1:
        page.line(Span(f"{best[0].cause}: {best[0].title}", "head"))
    else:
        page.line(Span(f"{len(best)} causes fit equally well", "head"))
    for book in books:
        page.section(f"{book.cause} · layer {book.layer} · {book.severity} · {book.score} points")
        page.line(book.title, indent=2)
        for reason in book.because:
            page.line(Span("because   ", "dim"), reason, indent=2, hang=12)
        page.line(Span("next      ", "dim"), Span(f"vllmdiag playbook show {book.cause}", "head", whole=True), indent=2)
    if lines:
        page.section("known lines of a log in it")
        for line in lines:
            words = "only an echo: the cause stands elsewhere. " if line.echo else ""
            page.line(Span(line.said, "head"), f": {words}{line.meaning}", indent=2, hang=4)
    page.gap()
    page.line(
        "words do not prove a cause; this looks at the server itself: ", Span("vllmdiag diagnose", "head", whole=True)
    )
    return page.text()


def explanation_text(explained: Explanation, style: Style) -> str:
    """A cause or a term in a few lines."""
    page = Page(style)
    page.line(Span(explained.title, "head"))
    page.line(explained.text, indent=2, hang=2)
    for key, text in (("shown by", explained.evidence), ("unlike", explained.not_to_be_confused)):
        if text:
            page.line(Span(key.ljust(10), "dim"), text, indent=2, hang=12)
    for i, other in enumerate(explained.see):
        command = other.startswith("vllmdiag ")
        page.line(Span(("" if i else "see").ljust(10), "dim"), Span(other, "head" if command else "plain"), indent=2)
    return page.text()


def names_text(causes: Iterable[str], terms: Iterable[str], style: Style) -> str:
    """Everything that can be explained."""
    page = Page(style)
    for title, names in (("causes", causes), ("terms", terms)):
        page.section(title)
        page.line(", ".join(names), indent=2, hang=2)
    page.gap()
    page.line("one of them: ", Span("vllmdiag explain NAME", "head", whole=True))
    return page.text()

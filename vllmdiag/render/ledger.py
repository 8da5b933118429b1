"""`ledger`: who copies what, how often, through what; and of a live server where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from vllmdiag.model.ledger import Entry, LayerTime, Ledger

from .page import Page, Span, Style, Text
from .words import duration, plural, size


def ledger_text(ledger: Ledger, style: Style) -> str:
    """Write a ledger."""
    page = Page(style)
    load, top = ledger.load, ledger.topology
    shape = f"tp {top.tp} x pp {top.pp} x dp {top.dp} ({top.executor})"
    tensor = f" and an array of {size(load.tensor_bytes)}" if load.tensor_bytes else ""
    page.line(
        Span(f"{shape} · a prompt of {plural(load.prompt_tokens, 'token')}{tensor}, {load.batch} in a step", "head")
    )
    for note in ledger.notes:
        page.line(Span("note  ", "dim"), note, indent=2, hang=8)
    if ledger.times:
        _times(page, ledger)
    _entries(page, f"one request, to the scheduler: {size(ledger.request_bytes)} copied", ledger.request)
    sums = ", ".join(f"{where} {size(n)}" for where, n in sorted(ledger.sums.items(), key=lambda pair: -pair[1]))
    _entries(page, f"one step: {size(ledger.step_bytes)} copied ({sums})", ledger.step)
    if style.verbose:
        page.section("numbers from")
        for source in ledger.sources:
            page.line(source, indent=2)
    return page.text()


def _entries(page: Page, title: str, entries: Sequence[Entry]) -> None:
    page.section(title)
    page.table(
        [
            (e.stage, e.what, e.by, e.where, size(e.bytes), f"x {e.times}" if e.times > 1 else "", size(e.total))
            for e in entries
        ],
        header=("stage", "what", "by", "where", "bytes", "times", "together"),
        indent=2,
        right={4, 6},
    )


def _times(page: Page, ledger: Ledger) -> None:
    page.section(f"where the time goes: {plural(ledger.steps_seen, 'step')} in {duration(ledger.window_s)}")
    rows: list[Sequence[Text]] = []
    for time in ledger.times:
        share = "" if time.share is None else f"{time.share:.0%}"
        seconds: Text = Span("unknown", "warn") if time.seconds is None else _seconds(time)
        rows.append((time.layer, seconds, f"a {time.per}" if time.seconds is not None else "", share, time.how))
    page.table(rows, header=("layer", "time", "per", "share", "how it is known, or why not"), indent=2, right={1, 3})


def _seconds(time: LayerTime) -> str:
    assert time.seconds is not None  # noqa: S101  asked before
    return f"{time.seconds * 1000:.2f} ms" if time.seconds < 1 else duration(time.seconds)

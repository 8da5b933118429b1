"""A recording in text: each server, its rings and what moved in them, when everything stood, and what `watch` said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllmdiag.model.recording import RecordedGeneration, Recording, Track

from .page import Page, Span, Style, Text
from .words import duration, number, plural, who

Stills = Sequence[tuple[float, float]]
_MOST = 20
"""More lines than this of a kind are counted, not listed, unless asked for (-v)."""


def recording_text(recording: Recording, stills: Mapping[int, Stills], style: Style) -> str:
    """Write a summary.

    Args:
        recording: what to sum up.
        stills: by number of the server: (from, to) of the times in which no ring moved.
        style: dress of the page.
    """
    page = Page(style)
    page.line(
        Span(plural(len(recording.generations), "server"), "head"), "; the end is cut off" if recording.cut else ""
    )
    for generation in recording.generations:
        _generation(page, generation, stills.get(generation.begin.generation, ()))
    return page.text()


def _generation(page: Page, generation: RecordedGeneration, stills: Stills) -> None:
    begin = generation.begin
    facts = [
        f"server {begin.generation}",
        f"vLLM {begin.vllm_version}" if begin.vllm_version else "",
        f"port {begin.port}" if begin.port else "",
        begin.node,
        f"from {begin.at}",
        f"{duration(generation.end_s - generation.start_s)} at {number(begin.hz)} Hz",
    ]
    page.section(" · ".join(fact for fact in facts if fact))
    rows: list[tuple[Text, ...]] = [_row(track) for track in generation.tracks]
    page.table(rows, header=("ring", "writer", "changes", "last change"), indent=2, right=(2,))
    if stills:
        page.gap()
        page.line("no ring moved:", indent=2)
        shown = [(f"{a:.1f} s", f"for {duration(b - a)}") for a, b in stills]
        _some(page, shown)
    if generation.events:
        page.gap()
        _some(page, [(f"{line.t:.1f} s", line.event.kind, line.event.summary) for line in generation.events])


def _row(track: Track) -> tuple[Text, ...]:
    last = f"{track.times[-1]:.1f} s" if track.times else "never seen"
    return track.ring.queue, who(track.ring.writer), number(max(0, len(track.times) - 1)), last


def _some(page: Page, rows: Sequence[Sequence[Text]]) -> None:
    shown = rows if page.style.verbose else rows[:_MOST]
    page.table(shown, indent=4)
    if len(shown) < len(rows):
        page.line(f"and {len(rows) - len(shown)} more", indent=4)

"""A recording shown again: played on a screen, or summed up in text."""

from __future__ import annotations

import time

from vllmdiag.model.errors import UsageError
from vllmdiag.model.recording import RecordedGeneration, Recording
from vllmdiag.render.page import Style
from vllmdiag.render.recording import recording_text

from .frames import frame_at
from .screen import Screen

_PICTURES_A_SECOND = 10
_STEP_S = 1.0
_STILL_S = 2.0
"""Pauses of all rings that are shorter are not worth a line of a summary."""


def chosen(recording: Recording, number: int | None) -> RecordedGeneration:
    """The server to show: the last one, or the one with that number. Raises UsageError."""
    if number is None:
        return recording.generations[-1]
    for generation in recording.generations:
        if generation.begin.generation == number:
            return generation
    there = ", ".join(str(g.begin.generation) for g in recording.generations)
    raise UsageError(f"no server {number} in this recording", why=f"it holds {there}", next="--server N")


def play(generation: RecordedGeneration, screen: Screen, speed: float, start_s: float) -> None:
    """Play to the end, or until ``q``: space pauses, the arrows step by a second."""
    t = max(generation.start_s, start_s)
    paused = False
    while True:
        began = time.monotonic()
        t = min(max(t, generation.start_s), generation.end_s)
        screen.show(frame_at(generation, t))
        key = screen.key(1 / _PICTURES_A_SECOND)
        if key == "q":
            return
        if key == " ":
            paused = not paused
        elif key in ("left", "right"):
            paused = True
            t += _STEP_S if key == "right" else -_STEP_S
        elif not paused:
            if t >= generation.end_s:
                return
            t += (time.monotonic() - began) * speed


def summary(recording: Recording, style: Style) -> str:
    """What a recording holds, in text."""
    return recording_text(recording, {g.begin.generation: stills(g) for g in recording.generations}, style)


def stills(generation: RecordedGeneration) -> tuple[tuple[float, float], ...]:
    """(from, to) of every time in which no ring moved, from 2 s on."""
    changes = sorted({t for track in generation.tracks for t in track.times} | {generation.start_s})
    ends = [*changes[1:], generation.end_s]
    return tuple((a, b) for a, b in zip(changes, ends, strict=True) if b - a >= _STILL_S)

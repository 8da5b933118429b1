"""`vllmdiag replay`: a recording of `watch`, again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllmdiag.cli.options import Ascii, Color, output_of
from vllmdiag.model.errors import ExitCode

EPILOG = """Examples:

\b
  vllmdiag replay night.rec             as it was; space pauses, arrows step, q ends
  vllmdiag replay night.rec --speed 20 --from 3600
  vllmdiag replay night.rec --at 3725   one picture
  vllmdiag replay night.rec | less      a summary in text"""


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What watch --record has written.")],
    speed: Annotated[float, typer.Option(metavar="X", help="So many times as fast.", min=0.01)] = 1.0,
    start: Annotated[float, typer.Option("--from", metavar="SECONDS", help="Begin there.", min=0)] = 0.0,
    at: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="One picture, of that time, and no more.", min=0)
    ] = None,
    server: Annotated[
        int | None, typer.Option(metavar="N", help="Which of several servers that were recorded: the last.", min=1)
    ] = None,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Show a recording."""
    from vllmdiag.watch.recording import read_recording
    from vllmdiag.watch.replay import chosen, play, summary

    output = output_of(context, None, color, ascii)
    recording = read_recording(file)
    generation = chosen(recording, server)
    if at is not None:
        from vllmdiag.render.live import live_text
        from vllmdiag.watch.frames import frame_at

        output.write(live_text(frame_at(generation, min(at, generation.end_s)), output.style))
    elif sys.stdout.isatty():
        from vllmdiag.watch.screen import Screen

        with Screen(output.style) as screen:
            play(generation, screen, speed, start)
    else:
        output.write(summary(recording, output.style))
    return ExitCode.OK

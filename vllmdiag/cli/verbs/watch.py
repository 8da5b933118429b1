"""`vllmdiag watch`: a live view, and the evidence of a stall before a restart destroys it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from vllmdiag.cli.look import live_only
from vllmdiag.cli.options import Common, Format
from vllmdiag.model.errors import ExitCode, NotPermittedError, UsageError
from vllmdiag.model.watch import Event, Frame

EPILOG = """Examples:

\b
  vllmdiag watch                        the only instance on this host, until Ctrl-C
  vllmdiag watch --port 8000 --stall 5 --bundles /var/tmp
  vllmdiag watch --headless --on-stall 'cp "$VLLMDIAG_BUNDLE" /evidence'
  vllmdiag watch --record night.rec     and later: vllmdiag replay night.rec

\b
When work is outstanding and nothing moves for --stall seconds, when a process dies, or when the server
logs its long-wait line, a bundle is written at once, and the command of --on-stall is run with
VLLMDIAG_BUNDLE, VLLMDIAG_CAUSE, VLLMDIAG_SUBJECT, VLLMDIAG_PID and VLLMDIAG_SUMMARY set.
A restarted server is watched again; where there is none, one is waited for. SIGTERM ends it with 0."""


def run(
    common: Common,
    stall: Annotated[
        float, typer.Option(metavar="SECONDS", help="So long nothing may move while work is outstanding.", min=1)
    ] = 10.0,
    hz: Annotated[
        float, typer.Option(metavar="HZ", help="How often the flags of rings are read.", min=1, max=100)
    ] = 100.0,
    bundles: Annotated[Path, typer.Option(metavar="DIR", help="Where captured bundles go.")] = Path(),
    keep: Annotated[int, typer.Option(metavar="N", help="Bundles that stay; the oldest go.", min=1)] = 5,
    redact: Annotated[
        bool, typer.Option("--redact/--no-redact", help="Replace hosts, addresses, users, paths and keys by tokens.")
    ] = True,
    on_stall: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run by sh when a bundle was written.")
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Follow this log too, beside those that the server writes itself."),
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No picture: one JSON event a line.")] = False,
    status: Annotated[float, typer.Option(metavar="SECONDS", help="How often a status event is given.", min=1)] = 10.0,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Record rings and states there.")] = None,
    record_mb: Annotated[
        int, typer.Option(metavar="MB", help="Bound of the recording; beyond it the older half goes.", min=1, max=256)
    ] = 16,
) -> int:
    """Watch an instance, and capture what goes wrong."""
    live_only(common, "watch")
    if not bundles.is_dir():
        raise UsageError(f"{bundles} is no directory", why="bundles go there", next="--bundles DIR")
    from vllmdiag.bundle.redact_key import host_redactor
    from vllmdiag.watch.evidence import Commands, Evidence
    from vllmdiag.watch.finding import Wanted
    from vllmdiag.watch.generation import Plan
    from vllmdiag.watch.outlet import Outlet
    from vllmdiag.watch.recorder import Recorder
    from vllmdiag.watch.watcher import watch

    stop = threading.Event()
    with _until_sigterm(stop), _dress(common, headless) as (emit, show):
        watch(
            Plan(hz=hz, stall_s=stall, status_s=status, window_s=common.window_s, logs=tuple(map(str, log or ()))),
            Wanted(common.target, common.port),
            Evidence(bundles, keep, host_redactor() if redact else None),
            Commands(on_stall),
            Outlet(emit, show, Recorder(record, record_mb << 20, hz) if record is not None else None),
            stop,
        )
    return ExitCode.OK


Emit = Callable[[Event], None]
Show = Callable[[Frame], None] | None


@contextlib.contextmanager
def _dress(common: Common, headless: bool) -> Iterator[tuple[Emit, Show]]:
    """How events and pictures are shown: a screen on a terminal, else a line for each event."""
    if headless or common.format is Format.JSON:
        import msgspec

        with _sink(common) as write:
            yield (lambda event: write(msgspec.json.encode(event).decode() + "\n")), None
    elif common.output.file is None and sys.stdout.isatty():
        from vllmdiag.watch.screen import Screen

        with Screen(common.output.style) as screen:
            yield (lambda _event: None), screen.show
    else:
        from vllmdiag.render.live import event_line

        style = common.output.style
        with _sink(common) as write:
            yield (lambda event: write(event_line(event, style))), None


@contextlib.contextmanager
def _sink(common: Common) -> Iterator[Callable[[str], None]]:
    """Write line by line, to the file of -o or to stdout. A reader of stdout that has gone ends the program quietly."""
    if common.output.file is None:
        yield _print
        return
    try:
        file = common.output.file.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise NotPermittedError(
            f"cannot write {common.output.file}", why=error.strerror or str(error), next="--output FILE"
        ) from None
    with file:
        yield lambda text: _append(file.write, text)


def _append(write: Callable[[str], int], text: str) -> None:
    write(text)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _until_sigterm(stop: threading.Event) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

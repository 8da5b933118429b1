"""`vllmdiag capture`: all that can be seen, in one file that can be judged again elsewhere."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllmdiag.cli import interrupt
from vllmdiag.cli.look import ProbeZmq, evidence, live_only, snapshot
from vllmdiag.cli.options import Common, Format
from vllmdiag.cli.output import Output
from vllmdiag.model.bundle import Estimate, Manifest
from vllmdiag.model.errors import ExitCode, TargetError, UsageError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.render.bundle import bundle_text, estimate_text
from vllmdiag.render.document import to_json

if TYPE_CHECKING:
    from vllmdiag.bundle.redact import Redactor

EPILOG = """Examples:

\b
  vllmdiag capture                      into vllmdiag-TIME.tar.gz, redacted
  vllmdiag capture 2839 -o before.tar.gz
  vllmdiag capture --window 60 --every 5
  vllmdiag capture --estimate           how large, how long; nothing is done
  vllmdiag capture -o - | ssh desk 'cat > bundle.tar.gz'
  vllmdiag capture --from raw.tar.gz    the same evidence, redacted

\b
Hosts, addresses, users, paths below homes, keys and tokens become tokens: the same one for the same
value, in every bundle of this host. Prompts, payloads and secrets of the environment are never read.
`vllmdiag diagnose --from FILE` gives the verdict again. Exit code 0: the bundle was written."""

_MOST_SNAPSHOTS = 240
_ONE_LOOK_S = 3.0


def run(
    common: Common,
    every: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Look again and again for the window, this often.", min=1.0, max=600.0),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact/--no-redact", help="Replace hosts, addresses, users, paths and keys by tokens.")
    ] = True,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how large and how long, and do nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    probe_zmq: ProbeZmq = False,
) -> int:
    """Write a bundle."""
    _check(common, every)
    if estimate:
        live_only(common, "--estimate")
        _show(common, _estimate(common, every))
        return ExitCode.OK
    file = common.output.file
    if file is not None and str(file) != "-" and not force and file.exists():
        raise UsageError(f"{file} exists", why="a bundle is never overwritten unasked", next="--force")
    if file is not None and str(file) == "-" and sys.stdout.isatty():
        raise UsageError("a bundle is no text for a terminal", next="-o FILE, or -o - into a pipe")
    from vllmdiag.bundle.archive import read_bundle
    from vllmdiag.bundle.pack import default_name, pack, save

    snapshots = evidence(common).snapshots if common.source is not None else _look(common, every, probe_zmq)
    data = pack(snapshots, _redactor(redact))
    if file is not None and str(file) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return ExitCode.OK
    path = str(file) if file is not None else default_name(snapshots[-1])
    manifest = read_bundle(io.BytesIO(data)).manifest  # what cannot be read again is not evidence
    save(data, path, force=force)
    if manifest is not None:
        _show(common, manifest, path, len(data))
    return ExitCode.OK


def _check(common: Common, every: float | None) -> None:
    """Refuse a series that has no end or no room. Raises UsageError."""
    if every is None:
        return
    live_only(common, "--every")
    if common.window_s is None:
        raise UsageError("--every needs --window", why="a series has an end", next="--window 60 --every 5")
    if common.window_s / every > _MOST_SNAPSHOTS:
        raise UsageError(
            f"{common.window_s / every:.0f} snapshots are too many",
            why=f"a bundle holds at most {_MOST_SNAPSHOTS}",
            next=f"--every {common.window_s / _MOST_SNAPSHOTS:.0f}",
        )


def _look(common: Common, every: float | None, probe_zmq: bool) -> list[Snapshot]:
    """One look, or one after the other until the window is over, the instance gone or the user has had enough."""
    if every is None or common.window_s is None:
        return [snapshot(common, "diagnose", probe_zmq)]
    began = time.monotonic()
    one = msgspec.structs.replace(common, window_s=min(_ONE_LOOK_S, every))
    taken: list[Snapshot] = []
    try:
        while not taken or time.monotonic() - began + every <= common.window_s + every / 2:
            time.sleep(max(0.0, began + len(taken) * every - time.monotonic()))
            taken.append(snapshot(one, "diagnose", probe_zmq))
    except (TargetError, KeyboardInterrupt) as stop:
        if not taken:
            raise
        interrupt.settle()
        why = stop.what if isinstance(stop, TargetError) else "interrupted"
        print(f"vllmdiag: {why}: the bundle holds {len(taken)} snapshots", file=sys.stderr)
    return taken


def _redactor(redact: bool) -> Redactor | None:
    """What replaces, and a word on stderr where its tokens are not those of this host, or where nothing is replaced."""
    if not redact:
        print(
            "vllmdiag: --no-redact: the bundle names hosts, addresses, users, paths; mind who gets it", file=sys.stderr
        )
        return None
    from vllmdiag.bundle.redact_key import host_redactor

    redactor = host_redactor()
    if redactor.account.note:
        print(
            f"vllmdiag: {redactor.account.note}; the tokens of this bundle are its own, and not those of other bundles",
            file=sys.stderr,
        )
    return redactor


def _estimate(common: Common, every: float | None) -> Estimate:
    from vllmdiag.bundle.estimate import estimated
    from vllmdiag.sources import target

    processes, instances = target.running("/")
    instance = target.choose(instances, processes, common.target, common.port, "/")
    window = common.window_s or _ONE_LOOK_S
    looks = 1 if every is None else max(1, round(window / every))
    return estimated(len(instance.members) if instance is not None else 0, looks, window)


def _show(common: Common, value: Manifest | Estimate, path: str = "", size: int = 0) -> None:
    """To stdout, wherever the bundle goes."""
    here: Output = msgspec.structs.replace(common.output, file=None)
    if common.format is Format.JSON:
        here.write(to_json(value))
    elif isinstance(value, Manifest):
        here.write(bundle_text(value, path, size, here.style))
    else:
        here.write(estimate_text(value, here.style))

"""From the command line to what was seen: the calls that every verb makes, and the exit code of a verb that shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllmdiag.cli.options import Common, Format
from vllmdiag.cli.output import progress
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.model.process import Frame
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceView
from vllmdiag.render.document import to_json
from vllmdiag.render.page import Style

if TYPE_CHECKING:
    from vllmdiag.bundle.archive import Bundle

_ALWAYS = {"schema", "observed_at", "window_s", "vllm_version", "model", "node", "port", "missing"}


ProbeZmq = Annotated[
    bool,
    typer.Option(
        "--probe-zmq",
        help="Ask every ZMQ endpoint for its type, once the window is over. It costs the server one connection to each,"
        " closed before the handshake is over: no message is sent or lost, and nothing but a socket monitor can notice"
        " it. Where it could do harm or prove nothing it is not done, and the reason is shown. Up to 1 s for each"
        " endpoint, 6 s for all.",
    ),
]
"""The option of the verbs that know about endpoints."""


def snapshot(common: Common, depth: str, probe_zmq: bool = False) -> Snapshot:
    """Watch the instance for the window, or read what was seen of one (``--from``).

    Args:
        common: target, port, window and verbosity, or the file.
        depth: the verb, which says how much is needed.
        probe_zmq: also ask its ZMQ endpoints for their types.

    Raises:
        TargetError: no such instance, or several to choose from.
        BadDataError: the file is no bundle and no snapshot.
        UsageError: a file was given, and something that only a live instance has.
    """
    if common.source is not None:
        live_only(common, "--probe-zmq" if probe_zmq else "")
        return evidence(common).snapshot
    from vllmdiag.sources.collect import collect
    from vllmdiag.sources.viewer import started

    say = progress(common.output.verbose)
    window_s = _window_s(common, depth)
    try:
        seen = collect(common.target, common.port, window_s, depth, say, asked=started(), meanwhile=prepare)
        return _probed(seen, say) if probe_zmq else seen
    finally:
        say("")


def evidence(common: Common) -> Bundle:
    """The file of ``--from``. Raises UsageError where it was given together with what only a live instance has."""
    from vllmdiag.bundle.archive import read_bundle

    if common.source is None:
        raise UsageError("no file was given", why="a bundle or a snapshot is needed", next="--from FILE")
    for option, value in (("TARGET", common.target), ("--port", common.port), ("--window", common.window_s)):
        live_only(common, option if value is not None else "")
    return read_bundle(sys.stdin.buffer if common.source == "-" else common.source)


def live_only(common: Common, option: str) -> None:
    """Refuse an option (empty: none) that makes no sense for evidence from a file. Raises UsageError."""
    if common.source is not None and option:
        raise UsageError(
            f"{option} and --from exclude each other",
            why="what a file holds is over",
            next=f"without {option}",
        )


def _probed(seen: Snapshot, say: Callable[[str], None]) -> Snapshot:
    from vllmdiag.sources.probe import with_probes

    return with_probes(seen, say)


def prepare() -> None:
    """Load while the window passes what the judging will need, so that the answer is there when the window ends."""
    from vllmdiag.diagnosis import judge, view  # noqa: F401
    from vllmdiag.vllm.signatures import match

    match((Frame(name="", file=""),))  # reads the table and compiles it


def _window_s(common: Common, depth: str) -> float:
    if common.window_s is not None:
        return common.window_s
    return 3.0 if depth in {"diagnose", "gpu"} else 1.0


def instance_view(common: Common, depth: str, probe_zmq: bool = False) -> InstanceView:
    """Watch the instance, and see it by role and rank. Raises what `snapshot` raises."""
    from vllmdiag.diagnosis.view import view

    return view(snapshot(common, depth, probe_zmq))


def host_view() -> InstanceView:
    """The shared memory of this machine, whichever instances run on it."""
    from vllmdiag.diagnosis.view import view
    from vllmdiag.sources.collect import collect_host

    return view(collect_host())


def show(
    common: Common, seen: InstanceView, sections: tuple[str, ...], text: Callable[[InstanceView, Style], str]
) -> int:
    """Write the sections of a view that a verb is about.

    Args:
        common: form and destination.
        seen: what was seen.
        sections: fields of the view; the others are left empty in JSON.
        text: writes the view for people.

    Returns:
        OK; UNKNOWN when there is nothing to show because it could not be observed. Judging is left to `diagnose`.
    """
    if common.format is Format.JSON:
        others = [name for name in seen.__struct_fields__ if name not in _ALWAYS and name not in sections]
        common.output.write(to_json(msgspec.structs.replace(seen, **dict.fromkeys(others, ()))))
    else:
        common.output.write(text(seen, common.output.style))
    empty = not any(getattr(seen, section) for section in sections)
    return ExitCode.UNKNOWN if empty and seen.missing else ExitCode.OK

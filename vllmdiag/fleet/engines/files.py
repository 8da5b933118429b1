"""Bundles that were collected already, one or several a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vllmdiag.bundle.archive import read_bundle
from vllmdiag.fleet.wire import GREETING, Answer
from vllmdiag.model.errors import VllmdiagError
from vllmdiag.model.fleet import NodeReport
from vllmdiag.model.snapshot import Snapshot


def read_files(files: Sequence[Path], done: Callable[[NodeReport], None]) -> tuple[NodeReport, ...]:
    """A report for each node that the bundles come from; a file that cannot be read is a node that answered garbage.

    Args:
        files: bundles, snapshots, or answers of `fleet node`. A directory stands for all files in it.
        done: called with each report.
    """
    found: dict[str, list[Snapshot]] = {}
    reports: list[NodeReport] = []
    for file in _each(files):
        if (answer := _answer(file)) is not None:
            reports.append(answer)
            continue
        try:
            snapshot = read_bundle(file).snapshot
        except VllmdiagError as error:
            reports.append(NodeReport(node=file.name, outcome="garbage", problem=error.why or error.what))
            continue
        found.setdefault(snapshot.node.hostname or file.name.split(".")[0], []).append(snapshot)
    for node, snapshots in found.items():
        reports.append(_report(node, snapshots))
    for report in reports:
        done(report)
    return tuple(reports)


def _answer(file: Path) -> NodeReport | None:
    """What `fleet node` wrote, the node named by the file; None where it is something else."""
    try:
        with file.open("rb") as lines:
            if lines.read(len(GREETING)) != GREETING:
                return None
            lines.seek(0)
            answer = Answer(file.name.split(".")[0], 0.0)
            while (data := lines.read(1 << 20)) and answer.feed(data, 0.0):
                pass
    except OSError:
        return None
    return msgspec.structs.replace(answer.report(0.0), skew_s=None, skew_within_s=None)


def _report(node: str, snapshots: list[Snapshot]) -> NodeReport:
    """The newest of each instance: a node may have been captured more than once."""
    newest: dict[object, Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda s: s.observed_at):
        newest[snapshot.node.boot_id, min(snapshot.target_pids, default=0)] = snapshot
    kept = tuple(newest.values())
    empty = not any(s.target_pids for s in kept)
    return NodeReport(
        node=node, outcome="empty" if empty else "answered", snapshots=() if empty else kept, tool=kept[-1].tool
    )


def _each(files: Sequence[Path]) -> list[Path]:
    """Directories opened, in order."""
    return [one for file in files for one in (_inside(file) if file.is_dir() else [file])]


def _inside(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.is_file())

"""Bundles that were collected already, one or several a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vllmdiag.bundle.archive import read_bundle
from vllmdiag.model.errors import VllmdiagError
from vllmdiag.model.fleet import NodeReport
from vllmdiag.model.snapshot import Snapshot


def read_files(files: Sequence[Path], done: Callable[[NodeReport], None]) -> tuple[NodeReport, ...]:
    """A report for each node that the bundles come from; a file that cannot be read is a node that answered garbage.

    Args:
        files: bundles or snapshots. A directory stands for all files in it.
        done: called with each report.
    """
    found: dict[str, list[Snapshot]] = {}
    reports: list[NodeReport] = []
    for file in _each(files):
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

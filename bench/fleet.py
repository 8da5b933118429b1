"""What judging a fleet costs: 480 nodes beside 48 of them, time of the processor and memory, bundles read and judged.

``python -m bench.fleet``. Exits with 1 where ten times the nodes cost more than eleven times as much.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bench.table import Row, show

SIZES = (48, 480)
ROUNDS = 3
MOST = 11.0


def write(directory: Path, n: int) -> None:
    """A file for each node, with a fault on one."""
    from tests.unit.fleet.nodes import replicas

    for report in replicas(n, "node017", "worker-stopped"):
        (directory / f"{report.node}.json").write_bytes(msgspec.json.encode(report.snapshots[0]))


def measure(directory: Path) -> None:
    """In a process of its own: seconds of CPU and bytes that reading and judging take, beyond what two nodes take."""
    from vllmdiag.fleet.engines.files import read_files
    from vllmdiag.fleet.judge import judge

    files = sorted(directory.iterdir())
    judge(read_files(files[:2], lambda _: None))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    fleet = judge(read_files(files, lambda _: None))
    taken = time.process_time() - began
    if (fleet.verdict.cause, fleet.verdict.subject.node) != ("process-stopped", "node017"):
        sys.exit(f"wrong verdict: {fleet.verdict}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([taken, grown / 1024]))


def best(directory: Path) -> tuple[float, float]:
    """The fastest and the leanest of some runs: noise only adds."""
    runs = []
    for _ in range(ROUNDS):
        command = [sys.executable, "-m", "bench.fleet", str(directory)]
        runs.append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    return min(run[0] for run in runs), min(run[1] for run in runs)


def main() -> int:
    """Measure both sizes, print the rows."""
    found = {}
    for n in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), n)
            found[n] = best(Path(name))
    (few_s, few_mib), (many_s, many_mib) = (found[n] for n in SIZES)
    peer = f"{SIZES[0]} nodes"
    rows = [
        Row(f"{SIZES[1]} nodes read and judged", many_s * 1e3, few_s * 1e3, peer, at_most=MOST),
        Row(f"memory of {SIZES[1]} nodes", many_mib, few_mib, peer, unit="MiB", at_most=MOST),
    ]
    return show(f"a fleet of nodes with eight ranks each, best of {ROUNDS}", rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        sys.exit(main())

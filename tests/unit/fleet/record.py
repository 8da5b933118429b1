"""Records the miniature in the states that the fleet's tests use: ``python -m tests.unit.fleet.record [NAME]...``

What was recorded lies beside it, so that the tests judge what the sources see of real processes without starting any.
"""

from __future__ import annotations

import gzip
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from vllmdiag.lab.faults import named
from vllmdiag.lab.inject import inject
from vllmdiag.lab.server import Lab
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.collect import collect

DIRECTORY = Path(__file__).parent / "recorded"
EIGHT = (
    "idle",
    "serving",
    "worker-stopped",
    "engine-stopped",
    "api-stopped",
    "worker-killed",
    "ring-full",
    "lost-message",
    "worker-busy",
    "input-thread-stuck",
    "input-thread-dead",
    "collective-divergence",
    "api-loop-blocked",
)
"""Of one node with eight ranks: the healthy states first, then the faults."""
TWO_NODES = ("idle", "worker-stopped")
"""Of two ranks on two nodes, which the miniature plays on one host."""


def path(state: str, shape: str = "tp8") -> Path:
    """Where a recording lies."""
    return DIRECTORY / f"{shape}-{state}.json.gz"


def recorded(state: str, shape: str = "tp8") -> Snapshot:
    """A recording."""
    return msgspec.json.decode(gzip.decompress(path(state, shape).read_bytes()), type=Snapshot)


def record(state: str, shape: str) -> None:
    """Start it, break it, look for two seconds, write it down without what names this machine."""
    fault = named(state)
    start = replace(fault.start(), tp=8) if shape == "tp8" else replace(fault.start(), tp=2, nodes=2)
    with Lab(start) as lab:
        lab.wait_ready()
        inject(lab, fault)
        seen = collect(lab.root, window_s=2.0)
    text = msgspec.json.encode(seen).replace(str(lab.work).encode(), b"/tmp/lab")
    text = text.replace(str(Path(__file__).parents[3]).encode(), b"/opt/vllmdiag")
    text = text.replace(str(Path(sys.base_prefix)).encode(), b"/opt/python")
    DIRECTORY.mkdir(exist_ok=True)
    path(state, shape).write_bytes(gzip.compress(text, 9, mtime=0))


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for shape, states in (("tp8", EIGHT), ("2nodes", TWO_NODES)):
        for state in states:
            if not wanted or state in wanted:
                record(state, shape)
                print(shape, state, path(state, shape).stat().st_size)

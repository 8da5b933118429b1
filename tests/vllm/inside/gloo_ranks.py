"""One rank of three that do collectives over gloo, the last of which does not fit; then it dumps its flight recorder.

``gloo_ranks.py MODE RANK DIRECTORY``: MODE is lag, kind or size, and rank 1 is the odd one. The dump is
``DIRECTORY/trace_RANK``. Ranks come to the last collective one after the other, each when the one before has dumped, so
that a rank that gloo ends for the mismatch has dumped before.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[import-not-found]

ODD, RANKS = 1, 3


def last_collective(mode: str, rank: int) -> None:
    """Ask for it and do not wait."""
    odd = rank == ODD
    if mode == "lag" and odd:
        return
    if mode == "kind" and odd:
        dist.all_gather([torch.ones(16) for _ in range(RANKS)], torch.ones(16), async_op=True)
    else:
        dist.all_reduce(torch.ones(32 if mode == "size" and odd else 16), async_op=True)


def main() -> None:
    """Run one rank until its input ends."""
    mode, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{directory}/store")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    while rank and not (directory / f"trace_{rank - 1}").exists():
        time.sleep(0.01)
    last_collective(mode, rank)
    dump = _dump_fr_trace(True, True, False)
    part = directory / f"part_{rank}"
    part.write_bytes(dump)
    part.rename(directory / f"trace_{rank}")
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()

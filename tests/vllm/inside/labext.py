"""Runs inside each vLLM worker (``--worker-extension-cls labext.LabExt``): RPC methods that make one rank misbehave.

Arguments arrive as JSON over POST /collective_rpc. `rank` None means every rank.
"""

from __future__ import annotations

import os
import time


class LabExt:
    """Mixed into vLLM's Worker, which brings `rank`."""

    rank: int

    def lab_sleep(self, seconds: float, rank: int | None = None) -> int:
        """Block in a system call for `seconds`."""
        if rank in (None, self.rank):
            time.sleep(seconds)
        return self.rank

    def lab_spin(self, seconds: float, rank: int | None = None) -> int:
        """Burn one core in Python for `seconds`."""
        if rank in (None, self.rank):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
        return self.rank

    def lab_barrier(self, rank: int | None = None) -> int:
        """Enter a barrier of all ranks; with `rank`, only that one enters, so it never returns."""
        if rank in (None, self.rank):
            import torch.distributed

            torch.distributed.barrier()
        return self.rank

    def lab_noop(self) -> int:
        """Do nothing."""
        return self.rank

    def lab_echo(self, length: int) -> str:
        """Answer with `length` characters: above the chunk size the reply overflows to the socket."""
        return "x" * length

    def lab_raise(self) -> None:
        """Fail."""
        raise ValueError("lab fault")

    def lab_exit(self, rank: int, code: int = 3) -> int:
        """End the process without a word."""
        if self.rank == rank:
            os._exit(code)
        return self.rank

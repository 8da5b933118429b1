"""Runs inside each vLLM worker (``--worker-extension-cls labext.LabExt``): RPC methods that make one rank misbehave.

Arguments arrive as JSON over POST /collective_rpc. `rank` None means every rank.
"""

from __future__ import annotations

import os
import pathlib
import time


def lab_spin(switch: str) -> None:
    """Burn one core in Python while `switch` exists."""
    while os.path.exists(switch):
        sum(range(100_000))


def lab_sleep(switch: str) -> None:
    """Sleep in the kernel while `switch` exists."""
    while os.path.exists(switch):
        time.sleep(0.2)


class LabExt:
    """Mixed into vLLM's Worker, which brings `rank`."""

    rank: int

    def lab_busy(self, switch: str, rank: int | None = None, how: str = "spin") -> int:
        """Stay here while the file `switch` exists, computing (``spin``) or asleep (``sleep``).

        ``SWITCH.entered`` exists meanwhile, so that a test can wait for it.
        """
        if rank in (None, self.rank):
            entered = pathlib.Path(switch).with_suffix(".entered")
            entered.touch()
            if how == "spin":
                lab_spin(switch)
            else:
                lab_sleep(switch)
            entered.unlink()
        return self.rank

    def lab_barrier(self, entered: str, rank: int) -> int:
        """Let one rank create the file `entered` and go into a barrier that no other rank comes to."""
        if rank == self.rank:
            import torch.distributed  # type: ignore[import-not-found]

            pathlib.Path(entered).touch()
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

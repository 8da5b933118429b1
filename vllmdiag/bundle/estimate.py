"""How large a bundle gets and how long it takes, before anything is done."""

from __future__ import annotations

from vllmdiag.model.bundle import Estimate

_FIXED_BYTES = 8_000
_PROCESS_BYTES = 4_000
"""Of one snapshot of one process, packed: its threads and three dumps of their stacks."""
_FIXED_S = 1.0
_PROCESS_S = 0.05
"""To write and read again what was seen of one process."""


def estimated(processes: int, snapshots: int, window_s: float) -> Estimate:
    """The estimate.

    Args:
        processes: of the instance.
        snapshots: how many the bundle will hold.
        window_s: seconds from the first to the last look.
    """
    return Estimate(
        processes=processes,
        snapshots=snapshots,
        seconds=round(window_s + _FIXED_S + _PROCESS_S * processes * snapshots, 1),
        size=snapshots * (_FIXED_BYTES + _PROCESS_BYTES * processes),
    )

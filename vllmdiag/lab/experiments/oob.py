"""Out-of-band pickling: a large buffer is handed over beside the pickle instead of being copied into it."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

from vllmdiag.refqueue.framing import INLINE_BELOW, Counted

from .memory import mib
from .report import Report

_BYTES = 8 << 20
_TIMES = 20


def measure() -> Report:
    """See the package."""
    payload = bytearray(_BYTES)
    framing = Counted()
    rows = []
    for name, obj in (("in band", payload), ("out of band", pickle.PickleBuffer(payload))):
        pickled, *beside = framing.encode(obj)
        seconds, allocated = _cost(partial(framing.encode, obj))
        rows += [
            (f"{name}: bytes in the pickle", f"{len(pickled)}"),
            (f"{name}: bytes beside it", f"{sum(map(len, beside))}"),
            (f"{name}: memory allocated to encode it", f"{mib(allocated)}, {allocated / _BYTES:.1f} copies"),
            (f"{name}: time to encode it", f"{seconds * 1e3:.2f} ms"),
        ]
    for size in (INLINE_BELOW - 1, INLINE_BELOW):
        n = len(framing.encode(pickle.PickleBuffer(bytearray(size))))
        rows.append((f"a buffer of {size} bytes", f"{n} {'part' if n == 1 else 'parts'} in the slot"))
    return Report(
        look_at=f"the parts that a message of {mib(_BYTES)} becomes, and tracemalloc's peak while it is encoded",
        rows=tuple(rows),
        learned="Below 1 MiB one more copy is cheaper than one more part. A message that does not fit its slot goes"
        " over the socket: its slot holds only the overflow byte.",
    )


def _cost(work: Callable[[], Any]) -> tuple[float, int]:
    """(seconds, bytes allocated at the peak) of one call."""
    begin = time.perf_counter()
    for _ in range(_TIMES):
        work()
    seconds = (time.perf_counter() - begin) / _TIMES
    tracemalloc.start()
    try:
        work()
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

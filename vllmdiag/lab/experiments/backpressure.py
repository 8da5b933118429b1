"""Backpressure: the ring lets its writer run ahead by as many messages as it has slots, and no further."""

from __future__ import annotations

import time
from contextlib import closing

from vllmdiag.refqueue import MessageQueue
from vllmdiag.refqueue.errors import QueueTimeoutError

from .report import Report

_SLOTS = 10
_PATIENCE_S = 0.2
_PACE_S = 0.02
_PACED = 25


def measure() -> Report:
    """See the package."""
    with closing(MessageQueue(2, 2, max_chunk_bytes=4096, max_chunks=_SLOTS)) as writer:
        handle = writer.export_handle()
        fast, slow = (MessageQueue.create_from_handle(handle, rank) for rank in range(2))
        with closing(fast), closing(slow):
            return _measure(writer, fast, slow)


def _measure(writer: MessageQueue, fast: MessageQueue, slow: MessageQueue) -> Report:
    published = 0
    begin = time.monotonic()
    try:
        while True:
            writer.enqueue(published, timeout=_PATIENCE_S)
            fast.dequeue()
            published += 1
    except QueueTimeoutError:
        waited = time.monotonic() - begin
    assert writer.ring is not None
    rows = [writer.ring.read_flags(slot) for slot in range(_SLOTS)]
    slow.dequeue()
    writer.enqueue("one more", timeout=_PATIENCE_S)
    begin = time.monotonic()
    for _ in range(_PACED):
        time.sleep(_PACE_S)
        slow.dequeue()
        writer.enqueue("paced")
        fast.dequeue()
    rate = _PACED / (time.monotonic() - begin)
    return Report(
        look_at="the flags at the end of the segment: what reader 0 and reader 1 have read of each slot",
        rows=(
            ("slots of the ring", f"{_SLOTS}"),
            ("messages published while reader 1 reads nothing", f"{published}"),
            ("then the writer waits, spinning", f"{waited:.2f} s until its time-out, nothing was sent"),
            ("flags then", " ".join("".join(map(str, row)) for row in rows)),
            ("after reader 1 has read one", "one more goes out"),
            (f"with a reader that takes one in {_PACE_S * 1e3:.0f} ms", f"{rate:.0f} messages a second"),
        ),
        learned="10 of 10 slots unread by one reader is a strong sign, and serving alone never gets there: EngineCore"
        " waits for the output rank at each step. One slot unread is the common hang.",
    )

"""Messages a second, and their delay, through our MessageQueue, vLLM's own and multiprocessing.Queue, in one run.

One writer sends as fast as it can to two readers (a multiprocessing.Queue for each, as nobody broadcasts there). A
delay runs from just before enqueue to just after dequeue. All three run in vLLM's interpreter, which `make test-vllm`
makes; the rounds take turns, so that a busy machine is busy for all of them, and the best round of each counts.

Exits with 1 when ours is less than twice as fast as vLLM's at 1 KiB, or slower at 8 MiB.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PEER = "vLLM's"
READERS = 2
ROUNDS = 5
SIZES = {"1 KiB": (1 << 10, 20_000), "8 MiB": (8 << 20, 150)}
"""Name -> (bytes, messages in a round)."""
TIMEOUT_S = 60
AT_LEAST = {"1 KiB": 2.0, "8 MiB": 1.0}
"""Messages a second, as a multiple of vLLM's."""

fork = multiprocessing.get_context("fork")


class Blob:
    """Bytes that pickle may leave out of band, as an array's are."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blob, (pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data),)


class Figures(NamedTuple):
    """What one round came to."""

    per_s: float
    p50_s: float
    p99_s: float


def _take(dequeue: Callable[[], Any], count: int, size: int, results: Any) -> None:
    delays = []
    for number in range(count):
        sent_at, got, blob = dequeue()
        delays.append(time.monotonic() - sent_at)
        if got != number or len(blob.data) != size:
            sys.exit(f"message {got} of {len(blob.data)} bytes instead of {number} of {size}")
    results.put(delays)


def _message_queue(kind: Any, count: int, size: int) -> Figures:
    """A round through ours or vLLM's, which have one interface."""
    queue = kind(READERS, READERS)

    def reader(rank: int) -> None:
        mine = kind.create_from_handle(queue.export_handle(), rank)
        mine.wait_until_ready()
        _take(lambda: mine.dequeue(timeout=TIMEOUT_S), count, size, results)

    results = fork.SimpleQueue()
    readers = [fork.Process(target=reader, args=(rank,)) for rank in range(READERS)]
    return _round(
        readers, queue.wait_until_ready, lambda message: queue.enqueue(message, TIMEOUT_S), results, count, size
    )


def _multiprocessing_queue(count: int, size: int) -> Figures:
    """A round through one multiprocessing.Queue for each reader."""
    queues = [fork.Queue(10) for _ in range(READERS)]  # as many messages ahead as a ring has slots

    def reader(rank: int) -> None:
        _take(lambda: queues[rank].get(timeout=TIMEOUT_S), count, size, results)

    def send(message: Any) -> None:
        for queue in queues:
            queue.put(message, timeout=TIMEOUT_S)

    results = fork.SimpleQueue()
    readers = [fork.Process(target=reader, args=(rank,)) for rank in range(READERS)]
    return _round(readers, lambda: None, send, results, count, size)


def _round(
    readers: list[Any], ready: Callable[[], None], send: Callable[[Any], None], results: Any, count: int, size: int
) -> Figures:
    for process in readers:
        process.start()
    ready()
    data = bytearray(os.urandom(size))
    began = time.monotonic()
    for number in range(count):
        send((time.monotonic(), number, Blob(data)))
    delays = sorted(delay for _ in readers for delay in results.get())
    per_s = count / (time.monotonic() - began)
    for process in readers:
        process.join()
    return Figures(per_s, statistics.median(delays), delays[len(delays) * 99 // 100])


def _inside() -> int:
    """The bench itself, in vLLM's interpreter, which finds our modules only now."""
    from bench.table import Row, show

    ours = importlib.import_module("vllmdiag.refqueue").MessageQueue
    theirs = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue
    subjects: dict[str, Callable[[int, int], Figures]] = {
        "ours": lambda count, size: _message_queue(ours, count, size),
        PEER: lambda count, size: _message_queue(theirs, count, size),
        "mp.Queue": _multiprocessing_queue,
    }
    figures: list[Row] = []
    for name, (size, count) in SIZES.items():
        rounds = [{who: run(count, size) for who, run in subjects.items()} for _ in range(ROUNDS)]
        best = {who: max(figures[who] for figures in rounds) for who in subjects}
        mine = best.pop("ours")
        for who, peers in best.items():
            least = AT_LEAST[name] if who == PEER else None
            figures.append(Row(f"{name} messages", mine.per_s, peers.per_s, who, "/s", at_least=least))
            figures.append(Row(f"{name} delay, median", mine.p50_s * 1e6, peers.p50_s * 1e6, who, "us"))
            figures.append(Row(f"{name} delay, p99", mine.p99_s * 1e6, peers.p99_s * 1e6, who, "us"))
    return show(f"1 writer, {READERS} readers, {os.cpu_count()} cores; best of {ROUNDS} rounds", figures)


def main() -> int:
    """Find vLLM, and go on in its interpreter."""
    sys.path[0] = str(ROOT)
    if "--inside" in sys.argv:
        return _inside()
    from tests.vllm.setup_vllm import ensure

    python = str(ensure().python)
    return subprocess.run([python, __file__, "--inside"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

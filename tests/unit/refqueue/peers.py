"""Readers in processes of their own, and objects to send them."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from vllmdiag.refqueue import Dialect, Handle, MessageQueue

DEADLINE_S = 60
"""Never reached unless something hangs."""

spawn = multiprocessing.get_context("spawn")


class Blob:
    """Bytes that pickle may leave out of band, as an array's are."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blob, (pickle.PickleBuffer(self.data),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and bytes(self.data) == bytes(other.data)

    def __hash__(self) -> int:
        return hash(bytes(self.data))


def some_bytes(size: int, seed: int = 0) -> bytearray:
    """Bytes in which a shift or a gap would show."""
    block = random.Random(seed).randbytes(4099)
    return bytearray((block * (size // len(block) + 1))[:size])


def digest(obj: Any) -> str:
    """Equal for equal objects, also where bytes came back as a bytearray or a view of a frame."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Blob):
            part = part.data
        if isinstance(part, (list, tuple)):
            found.update(b"%d items" % len(part))
            for item in part:
                add(item)
        elif isinstance(part, (bytes, bytearray, memoryview)):
            found.update(b"%d bytes" % memoryview(part).nbytes)
            found.update(part)
        else:
            found.update(repr(part).encode())

    add(obj)
    return found.hexdigest()


@dataclass(frozen=True)
class Job:
    """What a reader is to do."""

    handle: Handle
    rank: int
    count: int
    dialect: Dialect
    pause_s: float = 0.0
    """Between one message and the next."""


def _read(job: Job) -> list[str]:
    with MessageQueue.create_from_handle(job.handle, job.rank, dialect=job.dialect) as queue:
        queue.wait_until_ready(DEADLINE_S)
        digests = []
        for _ in range(job.count):
            digests.append(digest(queue.dequeue(timeout=DEADLINE_S)))
            if job.pause_s:
                time.sleep(job.pause_s)
        return digests


def _serve(pipe: Connection) -> None:
    while (job := pipe.recv()) is not None:
        pipe.send(_outcome(job))


def _outcome(job: Job) -> list[str] | Exception:
    try:
        return _read(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, `result` raises it
        return error


class Peer:
    """One process that reads when told to."""

    def __init__(self) -> None:
        self._pipe, theirs = spawn.Pipe()
        self.process: BaseProcess = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: Job) -> None:
        """Let it attach and read; `result` tells what it read."""
        self._pipe.send(job)

    def result(self) -> list[str]:
        """Digests of what it read, in order."""
        assert self._pipe.poll(DEADLINE_S), "the reader did not finish"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return cast("list[str]", answer)

    def stop(self) -> None:
        """End it."""
        if self.process.is_alive():
            self._pipe.send(None)
        self.process.join(DEADLINE_S)


@contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    """So many of them, ended afterwards."""
    made = [Peer() for _ in range(count)]
    try:
        yield made
    finally:
        for peer in made:
            peer.stop()


def read_by_all(
    messages: list[Any],
    readers: list[Peer],
    *,
    pauses_s: list[float],
    dialect: Dialect,
    chunk_bytes: int,
    chunks: int,
    before_each: Callable[[MessageQueue], None] = lambda _: None,
) -> list[list[str]]:
    """Send the messages to readers in other processes; what each of them got, as digests."""
    n = len(readers)
    with MessageQueue(n, n, max_chunk_bytes=chunk_bytes, max_chunks=chunks, dialect=dialect) as queue:
        for rank, (peer, pause_s) in enumerate(zip(readers, pauses_s, strict=True)):
            peer.start(Job(queue.export_handle(), rank, len(messages), dialect, pause_s))
        queue.wait_until_ready(DEADLINE_S)
        for message in messages:
            before_each(queue)
            queue.enqueue(message, timeout=DEADLINE_S)
        return [peer.result() for peer in readers]

"""The faults of this tier. A context manager heals what it broke; the others spoil the server for the next test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import procs
from .client import Call
from .server import Server
from .waiting import wait_until

How = Literal["spin", "sleep"]
SLOTS = 10
SHORT_S = 0.2
"""Patience of an RPC that is meant to be given up: its message stays behind."""


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end.

    Raises:
        ProcessLookupError: one of them has ended.
    """

    def all_stand() -> bool:
        states = [procs.state(pid) for pid in pids]
        if not {"", "Z", "X"}.isdisjoint(states):
            raise ProcessLookupError(f"of {pids} not all live")
        return all(state == "T" for state in states)

    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(f"{pids} are stopped", all_stand)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def kill(server: Server, *pids: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Kill some of its processes and wait until they are gone or zombies."""
    server.spoil("processes were killed")
    for pid in pids:
        os.kill(pid, sig)
    wait_until(f"{pids} are dead", lambda: all(procs.state(pid) in ("", "Z", "X") for pid in pids))


@contextmanager
def busy(server: Server, rank: int, how: How = "spin", *, waited_for: bool = True) -> Iterator[Call]:
    """One worker runs one long call, until the end of the block.

    With `waited_for` EngineCore waits for the replies (and takes no request meanwhile). Without, it gives up at once
    and goes on: the reply is left in the worker's response ring at the end, which spoils the server.
    """
    switch = server.work / f"busy-{rank}"
    switch.touch()
    if not waited_for:
        server.spoil("a reply was left unread")
    try:
        call = server.rpc("lab_busy", str(switch), rank, how, timeout_s=None if waited_for else SHORT_S)
        wait_until(f"rank {rank} is in its call", lambda: switch.with_suffix(".entered").exists())
        if not waited_for:
            call.result()
        yield call
    finally:
        switch.unlink()
        wait_until(f"rank {rank} has left its call", lambda: not switch.with_suffix(".entered").exists())


@contextmanager
def ring_full(server: Server, rank: int) -> Iterator[None]:
    """Every slot of the broadcast ring waits for one worker, and EngineCore hangs in the next write.

    Serving alone never gets there: it takes RPCs that nobody waits for. Spoils the server.
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(busy(server, rank, "sleep", waited_for=False))
        ring = broadcast_ring(server)
        while (filled := ring.unread(rank)) < SLOTS:
            server.rpc("lab_noop", timeout_s=SHORT_S).result()
            if ring.unread(rank) <= filled:
                raise RuntimeError(f"the ring of rank {rank} stays at {filled} slots")
        blocked = server.rpc("lab_noop")
        cleanup.callback(blocked.cancel)
        wait_until("EngineCore spins in its write", lambda: procs.state(server.engine) == "R")
        yield


def leave_reply(server: Server, rank: int) -> None:
    """A reply that nobody will read stands in the response ring of one worker. Spoils the server."""
    with busy(server, rank, "sleep", waited_for=False):
        pass
    ring = response_ring(server, rank)
    wait_until("a reply stands unread", lambda: ring.unread(0))


@contextmanager
def lone_collective(server: Server, rank: int) -> Iterator[Call]:
    """One worker enters a barrier alone. It never comes back: spoils the server."""
    server.spoil("a worker waits in a collective for ever")
    entered = server.work / f"barrier-{rank}"
    call = server.rpc("lab_barrier", str(entered), rank)
    try:
        wait_until(f"rank {rank} is at its barrier", entered.exists)
        yield call
    finally:
        call.cancel()


@contextmanager
def shm_filled(server: Server, keep_free: int = 0) -> Iterator[Path]:
    """Fill /dev/shm as the server sees it. Only for a server with a /dev/shm of its own (`shm_size`)."""
    server.spoil("its /dev/shm was full")
    filler = Path(f"/proc/{server.roots[0]}/root/dev/shm/filler")
    if filler.parent.stat().st_dev == Path("/dev/shm").stat().st_dev:
        raise ValueError("this would fill the machine's own /dev/shm")
    with filler.open("wb", buffering=0) as file:
        fd = file.fileno()
        room = os.fstatvfs(fd)
        os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize - keep_free)
        try:
            yield filler
        finally:
            os.ftruncate(fd, 0)
            with suppress(FileNotFoundError):  # the namespace went with its last process
                filler.unlink()


@contextmanager
def sockets_unlinked(server: Server) -> Iterator[list[Path]]:
    """The ipc paths of the server are gone (moved aside); they come back at the end."""
    moved = {Path(path): Path(path + ".aside") for path in procs.unix_paths(server.processes()) if Path(path).exists()}
    try:
        for path, aside in moved.items():
            path.rename(aside)
        yield sorted(moved)
    finally:
        for path, aside in moved.items():
            with suppress(FileNotFoundError):
                aside.rename(path)


# --- rings, read plainly: enough to know that a fault is in place


@dataclass(frozen=True)
class Ring:
    """One ring of 10 slots."""

    path: Path
    """Through the root of a holder, so that a private /dev/shm is no obstacle."""
    readers: int

    def rows(self) -> list[bytes]:
        """The metadata of each slot: written, then one flag for each reader."""
        row = 1 + self.readers
        with self.path.open("rb", buffering=0) as ring:
            ring.seek(-SLOTS * row, os.SEEK_END)
            tail = ring.read(SLOTS * row)
        return [tail[i : i + row] for i in range(0, len(tail), row)]

    def unread(self, reader: int) -> int:
        """Slots that one reader has not taken."""
        return sum(row[0] == 1 and row[1 + reader] == 0 for row in self.rows())


def broadcast_ring(server: Server, engine: int = 0) -> Ring:
    """The ring from one EngineCore to all its workers (slots of 16 MiB); reader k is its worker k."""
    pid = server.engines[engine]
    workers = [p.pid for p in procs.children([pid], procs.scan()) if p.kind == "Worker"]
    return _shared(pid, workers, 16 << 20)


def response_ring(server: Server, rank: int) -> Ring:
    """The ring from one worker to its EngineCore (slots of 24 MiB)."""
    worker = server.workers[rank]
    parent = procs.read(worker)
    return _shared(worker, [parent.ppid if parent else 0], 24 << 20)


def _shared(writer: int, readers: list[int], slot_bytes: int) -> Ring:
    size = SLOTS * (slot_bytes + 1 + len(readers))
    common = procs.mapped(writer).intersection(*(procs.mapped(pid) for pid in readers))
    paths = [Path(f"/proc/{writer}/root{path}") for path in common]
    sized = [path for path in paths if path.stat().st_size == size]
    if len(sized) != 1:
        raise LookupError(f"{len(sized)} segments of {size} bytes are shared by {writer} and {readers}")
    return Ring(sized[0], len(readers))

"""What pasted evidence lacks that a verdict could rest on: named with the command that would give it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.base import Missing
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.titles import identify

_MOST_PIDS = 20
_PS = "ps -eo pid,ppid,stat,etimes,comm,wchan:32,args"
_STACKS = "py-spy dump --nonblocking --pid PID"
_PS = "ps -eo pid,ppid,stat,etimes,comm,wchan:32,args"
_STACKS = "py-spy dump --nonblocking --pid PID"


def gaps(snapshot: Snapshot, told_apart: bool) -> tuple[Missing, ...]:
    """Holes of a snapshot made of pasted evidence, in the order in which they are worth filling.

    Args:
        snapshot: as far as it was given.
        told_apart: the evidence says how far its looks are apart.
    """
    return tuple(_gaps(snapshot, told_apart))


def _gaps(snapshot: Snapshot, told_apart: bool) -> Iterator[Missing]:
    pids = " ".join(str(p.pid) for p in snapshot.processes[:_MOST_PIDS])
    if not snapshot.processes:
        yield Missing(what="processes", why="not in the evidence", next=_PS)
    elif not any(p.samples for p in snapshot.processes):
        yield Missing(
            what="states of the processes",
            why="no ps in the evidence",
            next=_PS,
        )
    unseen = [p for p in snapshot.processes if not p.stacks and _python(p.cmdline, p.comm)]
    if unseen:
        names = ", ".join(str(p.pid) for p in unseen[:_MOST_PIDS])
        yield Missing(what=f"stacks of pid {names}", why="not in the evidence", next=_STACKS)
    if not snapshot.segments:
        yield Missing(what="rings", why="no ring dump in the evidence", next="vllmdiag ring")
    if not snapshot.sockets:
        yield Missing(what="sockets", why="no socket table in the evidence", next="ss -tanpie; ss -xap")
    if len(snapshot.metrics) < 2:
        why = "one scrape only" if snapshot.metrics else "not in the evidence"
        yield Missing(what="motion of the counters", why=why, next="curl -s localhost:8000/metrics, twice, 10 s apart")
    if snapshot.window_s == 0:
        yield Missing(
            what="whether anything moves",
            why="everything was looked at once",
            next=f"the same again 30 s later, for pid {pids}" if pids else "the same again 30 s later",
        )
    elif not told_apart:
        yield Missing(
            what="time between the looks",
            why=f"not in the evidence; taken as {snapshot.window_s:g} s over all",
            next="write the time above each piece",
        )


def _python(cmdline: object, comm: str) -> bool:
    """A part of vLLM that runs the engine or a model: its stack would tell what it does."""
    known = identify(cmdline if isinstance(cmdline, tuple) else (), comm)
    return known is not None and known.role in ("APIServer", "EngineCore", "Worker", "RayWorker", "DPCoordinator")

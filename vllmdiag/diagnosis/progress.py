"""How far a process of a start-up is, in words: shards, bytes, graphs, `i of n` engines or workers."""

from __future__ import annotations

from collections.abc import Mapping

from vllmdiag.model.startup import Checkpoint
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.loglines import find, origin_of
from vllmdiag.vllm.stages import READY_ORDER, Stage, shard_of

from .case import Case

_QUEUE_ORDER = 50
"""Stage of a worker that has reported ready: it has its model."""


def progress_words(case: Case, member: Member, stages: Mapping[int, Stage | None]) -> str:
    """What shows how far a member is; empty where nothing does.

    Args:
        case: the instance.
        member: of it.
        stages: stage of every member by pid.
    """
    stage = stages[member.pid]
    if stage is None:
        return ""
    if stage.part == "load":
        return _weights(case, member)
    if stage.waits_for == "engines":
        return _engines(case, stages)
    if stage.id == "engine.wait_workers":
        return _workers(case, member, stages, _QUEUE_ORDER)
    if stage.waits_for == "workers":
        return _workers(case, member, stages, READY_ORDER)
    return _from_log(case, member, "capture_progress") if stage.id == "worker.capture" else ""


def _weights(case: Case, member: Member) -> str:
    checkpoint = case.scene.processes[member.pid].checkpoint
    if checkpoint is None:
        return _from_log(case, member, "shard_progress")
    words = []
    shard = shard_of(checkpoint.path)
    if shard is not None:
        words.append(f"shard {shard[0]} of {shard[1]}")
    words.append(_share(case, member, checkpoint))
    if checkpoint.filesystem:
        words.append(f"from {checkpoint.filesystem}")
    return ", ".join(word for word in words if word)


def _share(case: Case, member: Member, checkpoint: Checkpoint) -> str:
    if not checkpoint.bytes:
        return ""
    if checkpoint.files > 1:
        return (
            f"{_size(checkpoint.before)} of {_size(checkpoint.bytes)} done ({checkpoint.before / checkpoint.bytes:.0%})"
        )
    # What it has fetched since it was born holds its imports too, but these are small beside weights.
    read = next((s.read_bytes for s in reversed(case.scene.processes[member.pid].samples) if s.read_bytes), None)
    if read is None:
        return f"{_size(checkpoint.bytes)} in one file"
    return f"about {_size(min(read, checkpoint.bytes))} of {_size(checkpoint.bytes)} read"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _engines(case: Case, stages: Mapping[int, Stage | None]) -> str:
    options = case.scene.options
    here = [e.pid for e in case.scene.engines]
    expected = max(len(here), options.data_parallel_size if options is not None else 1)
    ready = sum(_order(stages.get(pid)) >= READY_ORDER for pid in here)
    away = expected - len(here)
    return f"{ready} of {expected} ready" + (f", {away} not on this machine" if away > 0 and here else "")


def _workers(case: Case, engine: Member, stages: Mapping[int, Stage | None], order: int) -> str:
    options = case.scene.options
    workers = case.scene.instance.workers_of(engine.pid)
    expected = max(len(workers), options.world_size if options is not None else 1)
    done = sum(_order(stages.get(w.pid)) >= order for w in workers)
    away = expected - len(workers)
    return f"{done} of {expected}" + (f", {away} not here" if away > 0 else "")


def _order(stage: Stage | None) -> int:
    return stage.order if stage is not None else 0


def _from_log(case: Case, member: Member, kind: str) -> str:
    """The last line of that kind in its log: its own where the lines tell whose they are."""
    for line in reversed(case.scene.snapshot.log_lines):
        found = find(line.text, case.scene.version)
        origin = origin_of(line.text)
        if found is not None and found.kind.id == kind and (origin is None or origin[1] == member.pid):
            return f"{found.groups['done']} of {found.groups['total']} (log)"
    return ""

"""Who is who in pasted evidence, as far as one piece of it tells something of a process of another.

Nothing is guessed here: a ring dump says which pid writes and which reads, and an engine writes the broadcast ring.
A main thread that runs the main function of an engine is that of an engine, whatever its command line says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmdiag.model.base import Missing
from vllmdiag.vllm.titles import identify, role_of_main

if TYPE_CHECKING:
    from .draft import Draft, ProcessDraft

NOBODY = -1
"""Pid of the process that stands for the server where evidence names none."""


def relate(draft: Draft) -> None:
    """Join what belongs together before the snapshot is made."""
    _place_nobody(draft)
    _roles_from_stacks(draft)
    _roles_from_rings(draft)


def _place_nobody(draft: Draft) -> None:
    """Limits or an environment that name no process are those of the server: of its API server, or of its engine."""
    nobody = draft.processes.get(NOBODY)
    others = [p for pid, p in draft.processes.items() if pid != NOBODY]
    if nobody is None or not others:
        return
    if _role(nobody) == "APIServer" and not any(_role(p) == "APIServer" for p in others):
        return  # the command line of a server of which nothing else was given
    home = next((p for role in ("APIServer", "EngineCore") for p in others if _role(p) == role), None)
    home = home or (others[0] if len(others) == 1 else None)
    if home is None:
        return
    del draft.processes[NOBODY]
    for name, value in nobody.facts.items():
        if name == "environ":
            home.facts["environ"] = {**value, **home.facts.get("environ", {})}
        else:
            home.facts.setdefault(name, value)
    home.cgroup = {**nobody.cgroup, **home.cgroup}
    for look, fields in nobody.samples.items():
        home.samples[look] = {**fields, **home.samples.get(look, {})}


def _role(process: ProcessDraft) -> str:
    known = identify(process.facts.get("cmdline", ()), process.facts.get("comm", ""))
    return known.role if known is not None else ""


def _roles_from_stacks(draft: Draft) -> None:
    """Who has no title of its own is told by its stack: vLLM before 0.10.1 sets none, and a fork shows its parent's."""
    for process in draft.processes.values():
        if _role(process) in ("", "Child", "APIServer"):
            dumps = [threads for threads in process.dumps.values() if not isinstance(threads, Missing) and threads]
            role = role_of_main(dumps[0][0].frames) if dumps else ""
            if role:
                process.facts.setdefault("told_role", role)


def _roles_from_rings(draft: Draft) -> None:
    """The writer of a broadcast ring is an engine, its readers are workers; of a response ring it is the other way."""
    listed = {pid for pid, p in draft.processes.items() if p.in_table}
    for file in draft.files.values():
        claim = file.claim
        if claim is None:
            continue
        queue = claim.queue or ("broadcast" if claim.n_readers > 1 else "")
        writes, reads = {"broadcast": ("EngineCore", "Worker"), "response": ("Worker", "EngineCore")}.get(
            queue, ("", "")
        )
        parties = [(claim.writer, writes), *((reader, reads) for reader in claim.readers)]
        seen = [pid for pid, _ in parties if pid in listed]
        for pid, role in parties:
            if pid is None or not role:
                continue
            process = draft.known(pid)
            if _role(process) in ("", "Child"):
                process.facts.setdefault("told_role", role)
            if pid not in listed and claim.writer in listed and len(seen) >= 2 and not process.samples:
                process.sample(0, state="")  # the table shows its writer and its other readers, and not this one
                process.facts.setdefault("ppid", claim.writer if role == "Worker" else 0)

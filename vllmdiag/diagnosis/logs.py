"""What the logs say, as evidence: the first error of all of them, its echoes, and who waits in a long wait."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from vllmdiag.model.diagnosis import Subject
from vllmdiag.model.logs import LogDigest, LogEvent
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.logdigest import first_error
from vllmdiag.vllm.loglines import kind, side_of
from vllmdiag.vllm.titles import from_label

from .scene import Scene

SERVER_WAITS = ("waiting_engines", "waiting_engines_0_8")
"""Lines that a server logs every ten seconds while it waits for its engines."""
_SIDES = {
    "writer": "waits for a reader of its ring: the ring is full",
    "reader": "waits for the answer of a worker",
    None: "waits at a ring; at which side the line does not tell",
}


def root_event(logs: Sequence[LogDigest]) -> LogEvent | None:
    """The first error of all logs that is more than an echo; None where there is none."""
    return first_error(d.first_error for d in logs if d.first_error is not None)


def digest_of(snapshot: Snapshot, event: LogEvent) -> LogDigest:
    """The log that an event is of."""
    return next(d for d in snapshot.logs if event in (d.first_error, *d.echoes, *d.other_errors, *d.phases))


def server_waits(snapshot: Snapshot) -> list[LogEvent]:
    """What servers that have not served yet say of waiting for their engines."""
    starting = (event for log in snapshot.logs if not log.served for event in log.phases)
    return [event for event in starting if event.kind in SERVER_WAITS]


def known_cause(event: LogEvent) -> str:
    """The cause that such a line means where nothing speaks against it; empty where it decides nothing."""
    return "" if event.kind in ("exception", "error") else kind(event.kind).cause


def pid_words(pid: int) -> str:
    """A process by its number; pasted evidence may be of one whose number was not given."""
    return f"pid {pid}" if pid > 0 else "the process"


def event_words(event: LogEvent) -> str:
    """One line of evidence: where it stands, who said it and when, and what."""
    who = " ".join(part for part in (event.label, f"pid {event.pid}" if event.pid is not None else "") if part)
    if not who and event.rank is not None:
        who = f"rank {event.rank}"
    where = event.file.rpartition("/")[2] + (f":{event.number}" if event.number else "")
    said = ", ".join(part for part in (who, event.node, event.time) if part)
    what = event.text or event.exception or "an error"
    at = f" [{event.frame}]" if event.frame else ""
    often = f" ({event.count} times)" if event.count > 1 else ""
    return f"log {where}{f' ({said})' if said else ''}: {what[:240]}{at}{often}"


def echo_words(snapshot: Snapshot) -> list[str]:
    """The echoes, folded into one line."""
    echoes = [e for d in snapshot.logs for e in d.echoes if e.kind != "long_wait"]
    if not echoes:
        return []
    names = list(dict.fromkeys(shorten(e.text, 70, placeholder=" ...") for e in echoes))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"only echoes of it: {'; '.join(names[:3])}{more}"]


def wait_words(snapshot: Snapshot, version: str | None) -> list[str]:
    """Who has logged the long wait at a ring, and for whom such a line waits."""
    words = []
    for digest in snapshot.logs:
        for event in digest.echoes:
            if event.kind == "long_wait":
                side = side_of(f"[{event.source}]", version or digest.version)
                who = event.label or "a process"
                words.append(f"log {event.source}: {who} {_SIDES[side]} (said {event.count} times)")
    return words[:3]


def log_evidence(snapshot: Snapshot) -> list[str]:
    """What the logs add to a verdict that rests on other evidence.

    The first error, where it has lasted; without one, at which side of a ring somebody waits.
    """
    for digest in snapshot.logs:
        event = digest.first_error
        if event is not None and event == root_event(snapshot.logs) and (digest.failed or not digest.served):
            return ["first error in the " + event_words(event)]
    return wait_words(snapshot, next((p.version for p in snapshot.http if p.version), None))


def subject_of(event: LogEvent, snapshot: Snapshot, scene: Scene | None) -> Subject:
    """Whom an event is about."""
    members = scene.members if scene is not None else {}
    if event.kind == "engine_exited":
        engine = scene.engines[0].pid if scene is not None and len(scene.engines) == 1 else None
        return Subject(role="EngineCore", pid=engine, label="EngineCore", node=event.node or None)
    if (worker := event.groups.get("worker")) is not None and (lost := _worker(worker, scene)) is not None:
        return lost
    if scene is not None and event.pid in members:
        return scene.subject(event.pid)
    identity = from_label(event.label) if event.label else None
    node = event.node or None
    if identity is not None:
        return Subject(role=identity.role, pid=event.pid, rank=identity.ranks, label=identity.name, node=node)
    if event.rank is not None:
        label = f"rank {event.rank}"
        return Subject(role="Worker", pid=event.pid, rank={"rank": event.rank}, label=label, node=node)
    alone = snapshot.processes[0].pid if len(snapshot.processes) == 1 else 0
    pid = event.pid if event.pid is not None else alone if alone > 0 else None
    return Subject(role="Instance", pid=pid, label=f"pid {pid}" if pid is not None else "vLLM", node=node)


def _worker(name: str, scene: Scene | None) -> Subject | None:
    """The worker that an executor names by its number: ``VllmWorker-1``."""
    number = name.rpartition("-")[2]
    if not number.isdigit():
        return None
    if scene is not None and int(number) < len(scene.workers):
        return scene.subject(scene.workers[int(number)].pid)
    return Subject(role="Worker", rank={"index": int(number)}, label=name)

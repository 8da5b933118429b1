"""What logs decide: the first error names the cause, with what limits, mounts and environment say to it.

A log is judged only where nothing better is there: an engine that is seen in its loop answers for itself, and what its
log once said is at most evidence. A line that only echoes a fault is never blamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllmdiag.catalogue.entries import catalogue
from vllmdiag.model.diagnosis import Confidence, Finding, Link, Severity, Subject
from vllmdiag.model.logs import LogEvent
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.loglines import kind
from vllmdiag.vllm.titles import from_label

from . import write
from .case import Case
from .devices import xids
from .log_context import context_of, killed_for_memory, shm_cause
from .logs import (
    SERVER_WAITS,
    digest_of,
    echo_words,
    event_words,
    known_cause,
    root_event,
    server_waits,
    subject_of,
    wait_words,
)
from .scene import Scene

_SHM = ("insufficient_shm", "no_shm_segment", "shm_madvise", "no_space", "bus_error")
_DEAD = {"Worker": "worker-dead", "RayWorker": "worker-dead", "EngineCore": "engine-dead"}
_RELAYS = ("worker_failed", "worker_failed_start", "worker_init_failed", "worker_exception", "ray_actor_died")
_OF_A_PEER = {"gloo_closed": "has gone", "store_timeout": "has not come"}
"""Errors that a process logs because another one failed before it, and what they tell of that one."""
_WORKER_SILENT = ("rpc_timeout", "cancelled", "long_wait", "stale_reply")
"""Echoes that tell that some worker has not answered."""
_SAYS_MORE = ("cuda-fork-poisoned", "worker-dead", "port-conflict", "shm-unlinked-early")
"""Causes of which the line of the log says more than what was found around it."""
_DOING = {
    "ray-placement": "waits for Ray",
    "handshake-incomplete": "waits for its engines",
    "startup-phase-stuck": "stands in its start-up",
}
_PLACEMENT_S = 30.0
_OF_THE_DRIVER = ("driver_mismatch", "forward_compat")
"""Errors of CUDA that no other evidence need decide: what is wrong is said in them."""
_SOON_S = 120.0
"""An illegal address that comes later after a wake-up than this has another cause."""
_ADDRESS = re.compile(r"Xid \([^)]*\): 31\b")
_FOLLOWED_BY = {
    "weights_loaded": "the first run of the model, with its compilation",
    "compile_begins": "the compilation of the model",
    "compiled": "the profile of its memory",
    "kv_sized": "the warm-up and the capture of CUDA graphs",
    "capture_progress": "the rest of the capture of CUDA graphs",
    "graphs_captured": "the warm-up",
}
"""Steps of a start-up that a log tells of, and what the engine does after them."""
_LATE = ("kv_sized", "capture_progress", "graphs_captured")
"""After these no step takes minutes without a word."""
_STANDS_S = 120
_WAITS_LONG = 6
"""Rounds of ten seconds in which a server has logged that it waits for its engines."""


def log_findings(case: Case) -> Iterator[Finding]:
    """Findings from the logs of an instance whose processes are there too."""
    scene = case.scene
    engines = [e for e in scene.engines if not case.dead(e.pid)]
    if any(case.in_loop(e) for e in engines):
        # It answers for itself; only a wake-up is told by the log alone.
        if any(case.progress[e.pid].frozen for e in engines):
            yield from _woken_too_fast(scene.snapshot, scene)
        if scene.snapshot.pasted and any(case.acts[e.pid].signature == "ray.dag" for e in engines):
            yield from (f for f in _findings(scene.snapshot, scene, alive=True) if f.cause == "ray-channel-timeout")
        return
    alive = any(case.acts[m.pid].seen and not case.dead(m.pid) for m in (*engines, *scene.workers))
    for finding in _findings(scene.snapshot, scene, alive=alive):
        if not (case.starting_motion and finding.cause == "unknown"):
            yield finding


def loose_log_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Findings from logs alone."""
    yield from _findings(snapshot, None, alive=False)


def _findings(snapshot: Snapshot, scene: Scene | None, *, alive: bool) -> Iterator[Finding]:
    members = {m.pid for m in scene.instance.members} if scene is not None else set()
    hit = any(x.pid in members and _ADDRESS.search(x.text) for x in xids(snapshot))
    race = list(_woken_too_fast(snapshot, scene)) if not alive or hit else []
    if race:
        yield from race
        return
    event = root_event(snapshot.logs)
    if event is None:
        yield from _placement(snapshot, scene)
        if not alive:
            told = [*_workspace(snapshot, scene), *_ends_in_start_up(snapshot, scene)]
            yield from told[:1] or _echo_only(snapshot, scene)
            yield from _waits(snapshot, scene)
        return
    digest = digest_of(snapshot, event)
    if alive and event.generation != digest.generations:
        return  # what an earlier start has said of itself
    if event.kind == "nccl_watchdog":
        if not alive:
            yield _collective(snapshot, scene, event)
        return
    slug = _cause(snapshot, event, failed=digest.failed and not alive)
    if slug in catalogue():
        yield _of_event(snapshot, scene, event, slug)
    elif not alive and (digest.failed or event.kind in _OF_THE_DRIVER):
        yield _undecided(snapshot, scene, event)


def _woken_too_fast(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """A wake-up, and an address that was not there right after it."""
    faults = [e for d in snapshot.logs for e in (d.first_error, *d.other_errors) if e is not None]
    illegal = [e for e in faults if e.kind == "illegal_access"]
    xids = [k.text for k in snapshot.kernel_lines if _ADDRESS.search(k.text)]
    for woken in (e for d in snapshot.logs for e in d.phases if e.kind == "woken"):
        soon = [e for e in illegal if e.at is None or woken.at is None or 0 <= e.at - woken.at <= _SOON_S]
        if not soon and not (xids and not illegal):
            continue
        who = subject_of(soon[0] if soon else woken, snapshot, scene)
        yield _say(
            "sleep-wake-race",
            snapshot,
            scene,
            who,
            "the engine was woken, and right after it a rank used memory that was not mapped",
            evidence=[event_words(woken), *(event_words(e) for e in soon[:2]), *(f"kernel: {x}" for x in xids[:2])],
            confidence="high" if soon else "medium",
        )
        return


def _cause(snapshot: Snapshot, event: LogEvent, *, failed: bool) -> str:
    if event.kind in _SHM:
        return shm_cause(snapshot, event) or known_cause(event)
    killed = event.groups.get("exit_code") == "-9" or event.kind == "engine_exited"
    if killed and killed_for_memory(snapshot):
        return "oom-killed"
    if slug := known_cause(event):
        return slug
    if not failed or event.kind in _OF_A_PEER:
        return ""
    if event.kind in _RELAYS:
        return "worker-dead"
    identity = from_label(event.label) if event.label else None
    return _DEAD.get(identity.role, "") if identity is not None else ""


def _of_event(snapshot: Snapshot, scene: Scene | None, event: LogEvent, slug: str) -> Finding:
    who = subject_of(event, snapshot, scene)
    context = [words for words in context_of(slug, snapshot, event) if not words.endswith(event.text)]
    others = "worker" in event.groups or event.kind == "engine_exited"  # it speaks of somebody else
    words = _said(event) if others else f"{_name(who)} says {_said(event)}"
    told = context[0] if context and slug not in _SAYS_MORE else words
    sure: Confidence = "high" if event.part == "fault" and (known_cause(event) == slug or context) else "medium"
    return _say(
        slug,
        snapshot,
        scene,
        who,
        f"{catalogue()[slug].title}: {told}",
        evidence=[event_words(event), *context, *echo_words(snapshot)],
        confidence=sure,
    )


def _undecided(snapshot: Snapshot, scene: Scene | None, event: LogEvent) -> Finding:
    who = subject_of(event, snapshot, scene)
    told = _OF_A_PEER.get(event.kind)
    layer = 1 if told is None else 4 if digest_of(snapshot, event).served else 2
    if event.kind in _OF_THE_DRIVER:
        words, layer = f"{kind(event.kind).meaning}: {_said(event)}", 4
    elif told is None:
        words = f"the first error of the log is of no known cause: {_said(event)}"
    else:
        peer = f"its peer {event.groups['peer']}" if "peer" in event.groups else "another rank"
        words = (
            f"{_name(who)} only tells that {peer} {told}: read the first error of that one, before any restart of it"
        )
    return _say(
        "unknown",
        snapshot,
        scene,
        who,
        words,
        evidence=[event_words(event), *echo_words(snapshot)],
        layer=layer,
        confidence="low",
    )


def _collective(snapshot: Snapshot, scene: Scene | None, event: LogEvent) -> Finding:
    """NCCL gave up on a collective: whoever says so waited for somebody else, and who that is the log does not tell."""
    who = subject_of(event, snapshot, scene)
    return _say(
        "unknown",
        snapshot,
        scene,
        who,
        f"a collective ({event.groups['op']} {event.groups['seq']}) has not ended, and {_name(who)} waited in it:"
        " a rank that does not say so, or its GPU, is the place to look",
        evidence=[event_words(event), *echo_words(snapshot), *wait_words(snapshot, None)],
        layer=4,
        confidence="low",
    )


def _workspace(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """A faster way of all-reduce was not to be had, and from then on the log tells of waiting alone."""
    for digest in snapshot.logs:
        tried = [e for e in digest.phases if e.kind == "mnnvl_workspace"]
        waits = [e for e in digest.echoes if e.kind == "long_wait" and tried and e.number >= tried[0].number]
        if waits and not digest.served and len(waits) == len(digest.echoes):
            yield _say(
                "slow-fallback",
                snapshot,
                scene,
                subject_of(tried[-1], snapshot, scene),
                f"the start-up waits since a faster way of all-reduce was not to be had: {_said(tried[-1])}",
                evidence=[event_words(e) for e in (*tried[-1:], *waits[:2])],
                confidence="low",
            )


def _placement(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """The engine waits for Ray, and says so again and again."""
    waits = [e for d in snapshot.logs if not d.served for e in d.phases if e.kind == "ray_placement"]
    if not waits or float(waits[-1].groups.get("seconds", "0")) < _PLACEMENT_S:
        return
    event = waits[-1]
    context = context_of("ray-placement", snapshot, event)
    yield _say(
        "ray-placement",
        snapshot,
        scene,
        subject_of(event, snapshot, scene),
        context[0] if context else f"Ray has not given the resources for {event.groups['seconds']} s",
        evidence=[event_words(event), *context],
        confidence="high" if context else "medium",
    )


def _echo_only(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """Only echoes: where to look for the root."""
    echoes = [e for d in snapshot.logs for e in d.echoes]
    telling = [e for e in echoes if _of_a_silent_worker(e) or (e.kind != "exception" and kind(e.kind).ends)]
    if not telling:
        yield from _noise(snapshot, scene, echoes)
        return
    first = next((e for e in telling if e.kind not in ("long_wait", "exception")), telling[0])
    who = subject_of(first, snapshot, scene)
    yield _say(
        "echo-only",
        snapshot,
        scene,
        who,
        f"the log holds only echoes of a fault: {_said(first)}; {_where_to_look(first)}",
        evidence=[*(event_words(e) for e in telling[:4]), *wait_words(snapshot, None), *_last_words(snapshot)],
        confidence="low",
    )


def _of_a_silent_worker(event: LogEvent) -> bool:
    """Somebody gave up waiting, or says that it waits; an exception is an echo where it was raised in such a wait."""
    return event.kind in _WORKER_SILENT or (event.kind == "exception" and event.exception == "TimeoutError")


def _noise(snapshot: Snapshot, scene: Scene | None, echoes: list[LogEvent]) -> Iterator[Finding]:
    """What Python says of leftovers at the end of a process, and no error: it tells when that ended, and not why."""
    left = [e for e in echoes if e.kind == "leaked_shm"]
    if left:
        yield _say(
            "echo-only",
            snapshot,
            scene,
            subject_of(left[0], snapshot, scene),
            "the log holds no error: that objects are left over is the noise of a shutdown; look above it for why",
            evidence=[*(event_words(e) for e in left[:2]), *_last_words(snapshot)],
            confidence="low",
        )


def _where_to_look(event: LogEvent) -> str:
    if event.kind == "engine_init_failed":
        return "look for the first error of an EngineCore or a Worker above it, and for a death by signal (dmesg)"
    if _of_a_silent_worker(event):
        return "a worker has not answered: look for the last words of each worker, and take its stacks"
    return "EngineCore has ended: look for its own first error above it, and for a death by signal (dmesg)"


def _last_words(snapshot: Snapshot) -> list[str]:
    """What is known of how far the workers came."""
    last = [d.last_time for d in snapshot.logs if d.last_time]
    return [f"the log ends at {last[-1]}"] if last else []


def _waits(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """A server that waits for engines, and nothing else is known."""
    if any(d.echoes or d.first_error for d in snapshot.logs):
        return
    waits = server_waits(snapshot)
    if not waits:
        return
    event = waits[-1]
    long = scene is None and event.count >= _WAITS_LONG
    yield _say(
        "handshake-incomplete" if long else "unknown",
        snapshot,
        scene,
        subject_of(event, snapshot, scene),
        f"the server waits for its engines: {_said(event)}",
        evidence=[event_words(event), "what the engines do is not in the evidence: take their stacks, twice"],
        confidence="low",
        severity=None if long else "warning",
        layer=None if long else 2,
    )


def _ends_in_start_up(snapshot: Snapshot, scene: Scene | None) -> Iterator[Finding]:
    """A log of a start-up that has no error and comes to no end: the last step that it tells of."""
    for digest in snapshot.logs:
        steps = [e for e in digest.phases if e.kind in _FOLLOWED_BY]
        waits = [e for e in digest.phases if e.kind in SERVER_WAITS]
        rings = [e for e in digest.echoes if e.kind == "long_wait"]
        ready = any(e.kind == "engine_ready" for e in digest.phases)
        if not steps or ready or digest.served or digest.failed or len(rings) < len(digest.echoes):
            continue
        last = steps[-1]
        stood = max([10 * e.count for e in waits] + [int(e.groups.get("seconds", "60")) * e.count for e in rings] + [0])
        late = last.kind in _LATE and stood >= _STANDS_S
        if not late and any(e.count >= _WAITS_LONG for e in waits):
            continue
        after = f"after '{_said(last)[:80]}' comes {_FOLLOWED_BY[last.kind]}"
        yield _say(
            "startup-phase-stuck" if late else "unknown",
            snapshot,
            scene,
            subject_of(last, snapshot, scene),
            f"the start-up stands: {after}, and for {stood} s the log tells of waiting alone"
            if late
            else f"the log ends within a start-up: {after}; whether it stands is not in it",
            evidence=[event_words(e) for e in (last, *waits[-1:], *rings[:2])]
            + ["what would decide it: stacks of the engine and of its workers, twice, and their CPU"],
            confidence="low",
            layer=2,
            severity=None if late else "warning",
        )
        return


# -- writing ----------------------------------------------------------------------------------------------------------


def _say(  # noqa: PLR0913  one keyword for each field of a Finding
    slug: str,
    snapshot: Snapshot,
    scene: Scene | None,
    who: Subject,
    summary: str,
    *,
    evidence: list[str],
    confidence: Confidence,
    layer: int | None = None,
    severity: Severity | None = None,
) -> Finding:
    target = (
        scene.instance.roots[0] if scene is not None else who.pid or next((p.pid for p in snapshot.processes), None)
    )
    return write.finding(
        slug,
        who,
        summary,
        evidence=evidence,
        chain=(Link(subject=who, doing=_DOING.get(slug, "has failed")),),
        confidence=confidence,
        severity=severity,
        layer=layer,
        words={"target": str(target)} if target is not None else {},
    )


def _name(who: Subject) -> str:
    return f"{who.label} (pid {who.pid})" if who.pid is not None and f"{who.pid}" not in who.label else who.label


def _said(event: LogEvent) -> str:
    return (event.text or event.exception or "an error")[:200].rstrip()

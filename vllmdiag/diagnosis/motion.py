"""Does anything move, and is work outstanding? Per engine, over the window. Busy is not stuck; idle is not stuck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllmdiag.model.http import MetricsScrape
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.metrics import METRICS

from .activity import IDLE, WAITING, Activity
from .devices import seems_spinning
from .rings import BROADCAST, RESPONSE, Ring
from .scene import Scene

_COUNTS = ("_total", "_count", "_sum")
"""How the names of counters end; everything else is a gauge, which repeats what was and proves no motion."""
_BACKLOG_BYTES = 1
_UNFINISHED = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "num_requests_waiting_by_reason:deferred": "deferred",
}


@dataclass(frozen=True)
class Progress:
    """What moved and what waits for one engine."""

    moved: tuple[str, ...]
    """Evidence of motion, in words; empty when nothing moved."""
    outstanding: tuple[str, ...]
    """Evidence of work that waits, in words; empty when none is known."""
    gauges: tuple[str, ...]
    """What /metrics says of unfinished requests. It repeats the last step: stale for an engine that is idle."""
    counters_known: bool
    """/metrics was read twice, so frozen counters are a fact."""

    @property
    def frozen(self) -> bool:
        """Work is outstanding and nothing moved."""
        return bool(self.outstanding) and not self.moved


def progress_of(scene: Scene, engine: Member, rings: Sequence[Ring], acts: Mapping[int, Activity]) -> Progress:
    """Judge the motion of one engine and its workers."""
    own = [r for r in rings if engine.pid in (r.writer, *r.readers)]
    moved = [f"{_name(r, scene)} moved ({r.moved} changes)" for r in own if _ring_moved(r)]
    counters = _counters(scene, engine)
    moved += [f"{name} {first:g} -> {last:g}" for name, (first, last) in counters.items() if last != first]
    outstanding = [*_waiting_rings(scene, own), *_backlog(scene, engine)]
    gauges = _gauges(scene, engine)
    act = acts.get(engine.pid)
    if act is not None and act.seen and act.kind != IDLE:
        outstanding += gauges
    if act is not None and act.kind == WAITING and act.state in ("wait_response", "wait_readers"):
        outstanding.append(f"{engine.label}: {act.doing}")
    elif act is not None and act.state in ("gpu_wait", "collective") and _gpu_spins(scene):
        outstanding.append(f"{engine.label}: {act.doing}, and a GPU runs a kernel that only waits")
    return Progress(
        moved=tuple(moved), outstanding=tuple(outstanding), gauges=tuple(gauges), counters_known=bool(counters)
    )


def _gpu_spins(scene: Scene) -> bool:
    """Pasted evidence of a GPU that is busy and does nothing: the step that the engine is in does not end."""
    return scene.snapshot.pasted and any(seems_spinning(device) for device in scene.snapshot.accelerators)


def _ring_moved(ring: Ring) -> bool:
    # Something published or taken; a slot that is unread all the time while others pass by does not happen in a ring.
    return ring.sampled and ring.moved > 0


def _name(ring: Ring, scene: Scene) -> str:
    writer = scene.members.get(ring.writer or 0)
    return f"{ring.queue or 'unknown'} ring" + (f" of {writer.label}" if writer and ring.queue == RESPONSE else "")


def _waiting_rings(scene: Scene, rings: Sequence[Ring]) -> list[str]:
    found = []
    for ring in rings:
        if ring.queue not in (BROADCAST, RESPONSE) or not ring.stuck:
            continue
        for reader, slots in ring.stuck.items():
            pid = ring.readers[reader] if reader < len(ring.readers) else None
            who = scene.members[pid].label if pid in scene.members else f"reader {reader}"
            found.append(f"{_name(ring, scene)}: {len(slots)} of {ring.geometry.chunks} slots unread by {who}")
    return found


def engine_of_metrics(engine: Member) -> str:
    """The `engine` label under which /metrics counts this engine."""
    return str(engine.ranks.get("dp", 0))


def _scrapes(snapshot: Snapshot) -> dict[int, list[MetricsScrape]]:
    by_port: dict[int, list[MetricsScrape]] = {}
    for scrape in snapshot.metrics:
        by_port.setdefault(scrape.port, []).append(scrape)
    return by_port


def _counters(scene: Scene, engine: Member) -> dict[str, tuple[float, float]]:
    label = engine_of_metrics(engine)
    found: dict[str, tuple[float, float]] = {}
    for scrapes in _scrapes(scene.snapshot).values():
        if len(scrapes) < 2:
            continue
        for name in METRICS.kept:
            if not is_counter(name):
                continue
            first, last = _value(scrapes[0], name, label), _value(scrapes[-1], name, label)
            if first is not None and last is not None:
                found[name] = (first, last)
    return found


def _value(scrape: MetricsScrape, name: str, label: str) -> float | None:
    per_engine = scrape.values.get(name)
    if per_engine is None:
        return None
    return per_engine.get(label, per_engine.get("") if len(per_engine) == 1 else None)


def counter(scene: Scene, engine: Member, name: str) -> tuple[float, float] | None:
    """A counter at the first and the last scrape of the window; None where it was not read twice."""
    return _counters(scene, engine).get(name)


def gauge(scene: Scene, engine: Member, name: str) -> float | None:
    """The gauge at the end of the window; it repeats what the last finished step said and may be stale."""
    label = engine_of_metrics(engine)
    for scrapes in _scrapes(scene.snapshot).values():
        value = _value(scrapes[-1], name, label)
        if value is not None:
            return value
    return None


def deferred(scene: Scene, engine: Member) -> float | None:
    """Requests that wait for something else than room, such as their KV blocks of another instance."""
    return gauge(scene, engine, "num_requests_waiting_by_reason:deferred")


def _gauges(scene: Scene, engine: Member) -> list[str]:
    found = []
    label = engine_of_metrics(engine)
    for scrapes in _scrapes(scene.snapshot).values():
        for name, words in _UNFINISHED.items():
            values = [_value(s, name, label) for s in scrapes]
            if len(values) >= 2 and all(v is not None and v > 0 for v in values):
                found.append(f"{values[-1]:g} requests {words} by /metrics in every scrape")
    return found


def _backlog(scene: Scene, engine: Member) -> list[str]:
    """Bytes that the engine has not read from its request socket, in every sample."""
    found = []
    for sock in scene.snapshot.sockets:
        if engine.pid not in sock.pids or sock.state == "LISTEN" or len(sock.samples) < 2:
            continue
        if all(s.recv_q >= _BACKLOG_BYTES for s in sock.samples):
            found.append(f"{sock.samples[-1].recv_q} B on a socket of {engine.label} not read in any sample")
    return found


def unanswered(scene: Scene) -> list[str]:
    """Requests for tokens that got no answer, in words. Only pasted evidence has some: a look asks for none."""
    return [
        f"{probe.method} {probe.path}: no answer" + (f" in {probe.total_s:g} s" if probe.total_s else "")
        for probe in scene.snapshot.http
        if probe.method == "POST" and probe.status is None and probe.error == "timeout"
    ]


def counters(snapshot: Snapshot) -> dict[str, bool]:
    """Counters of /metrics that were read twice, whatever engine they are of: whether each has moved."""
    moved: dict[str, bool] = {}
    for scrapes in _scrapes(snapshot).values():
        before = scrapes[0].values
        for scrape in scrapes[1:]:
            for name, by_engine in scrape.values.items():
                if is_counter(name) and name in before:
                    changed = any(before[name].get(engine) != value for engine, value in by_engine.items())
                    moved[name] = moved.get(name, False) or changed
    return moved


def prompts_only(snapshot: Snapshot, label: str | None = None) -> list[str]:
    """What shows that prompts are worked off and nothing is generated any more, in words; empty where that is not so.

    An engine that never counted a token is one of a pooling model.

    Args:
        snapshot: with two scrapes of /metrics or more.
        label: of the engine in /metrics; all of them together where it is None.
    """
    for first, *_, last in (scrapes for scrapes in _scrapes(snapshot).values() if len(scrapes) > 1):
        total = [
            sum(value for engine, value in s.values.get(name, {}).items() if label is None or engine in (label, ""))
            for s in (first, last)
            for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_running")
        ]
        prompts, tokens, running = zip(total[:3], total[3:], strict=True)
        if prompts[1] > prompts[0] and tokens[0] == tokens[1] > 0 and running[1] > 0:
            return [
                f"prompt_tokens_total {prompts[0]:g} -> {prompts[1]:g}",
                f"generation_tokens_total stands at {tokens[1]:g}, {running[1]:g} requests running",
            ]
    return []


def tokens_for_somebody(snapshot: Snapshot) -> list[str]:
    """What shows that tokens are made for requests that run all the while, in words; empty where nothing does."""
    for scrapes in _scrapes(snapshot).values():
        running = [sum(s.values.get("num_requests_running", {}).values()) for s in scrapes]
        made = [sum(s.values.get("generation_tokens_total", {}).values()) for s in scrapes]
        if len(scrapes) > 1 and min(running) > 0 and made[-1] > made[0]:
            return [f"{running[-1]:g} requests running", f"generation_tokens_total {made[0]:g} -> {made[-1]:g}"]
    return []


def counters_moved(snapshot: Snapshot) -> bool | None:
    """Any of them has moved; None where they were not read twice."""
    moved = counters(snapshot)
    return any(moved.values()) if moved else None


def is_counter(name: str) -> bool:
    """It only grows: a change is motion."""
    return name.partition(":")[0].endswith(_COUNTS)

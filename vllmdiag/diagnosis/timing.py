"""Where the time of a live server goes, layer by layer, as far as rings and counters tell. What they do not is said.

The rings are polled about a thousand times a second, which splits a step of the executor: published and not yet read by
every rank (ring wait), read and not yet answered (compute), answered and not yet read (reply), read and nothing new
published (engine: scheduling, or nothing to do). /metrics gives what requests have spent in queues.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllmdiag.model.ledger import LayerTime
from vllmdiag.model.ring import RingState
from vllmdiag.vllm.instances import Member

from .case import Case
from .motion import counter
from .rings import BROADCAST, RESPONSE, Ring

_PHASES = ("ring wait", "compute", "reply", "engine")
_COARSE_S = 0.005
"""Steps shorter than this are split no better than the polling allows."""


def times_of(case: Case) -> tuple[tuple[LayerTime, ...], int]:
    """Times of every layer in the order of a request, and the steps that were seen."""
    counters = [_counted(case, engine) for engine in case.scene.engines]
    steps = 0
    found: list[LayerTime] = []
    for engine, (before, after) in zip(case.scene.engines, counters, strict=True):
        name = f" of {engine.label}" if len(case.scene.engines) > 1 else ""
        inside, n = _in_steps(case, engine)
        steps += n
        found += [msgspec.structs.replace(t, layer=t.layer + name) for t in (*before, *inside, *after)]
    found.append(_client(case))
    return tuple(found), steps


def _mean(case: Case, engine: Member, name: str) -> float | None:
    """Mean of a histogram of /metrics over what the window added to it; None where nothing was added, or not seen."""
    total, count = counter(case.scene, engine, f"{name}_sum"), counter(case.scene, engine, f"{name}_count")
    if total is None or count is None or count[1] <= count[0]:
        return None
    return (total[1] - total[0]) / (count[1] - count[0])


def _counted(case: Case, engine: Member) -> tuple[list[LayerTime], list[LayerTime]]:
    """What /metrics tells: before the steps, and after them."""
    queue = _mean(case, engine, "request_queue_time_seconds")
    prefill = _mean(case, engine, "request_prefill_time_seconds")
    decode = _mean(case, engine, "request_decode_time_seconds")
    whole = _mean(case, engine, "e2e_request_latency_seconds")
    none = "no request ended within the window" if case.scene.snapshot.metrics else "/metrics was not read twice"
    rest = None
    if whole is not None and queue is not None and prefill is not None and decode is not None:
        rest = max(0.0, whole - queue - prefill - decode)
    outside = LayerTime(
        layer="API server, input, output",
        per="request",
        seconds=rest,
        how="e2e less queue, prefill and decode: the three are not told apart" if rest is not None else none,
    )

    def told(layer: str, seconds: float | None, metric: str) -> LayerTime:
        return LayerTime(
            layer=layer, per="request", seconds=seconds, how=f"mean of {metric}" if seconds is not None else none
        )

    after = [
        told("prefill", prefill, "request_prefill_time_seconds"),
        told("decode", decode, "request_decode_time_seconds"),
    ]
    return [outside, told("scheduler queue", queue, "request_queue_time_seconds")], after


def _in_steps(case: Case, engine: Member) -> tuple[list[LayerTime], int]:
    """Shares of the polled time, and means of a step."""
    out = next((r for r in case.rings if r.queue == BROADCAST and r.writer == engine.pid and r.sampled), None)
    back = [r for r in case.rings if r.queue == RESPONSE and engine.pid in r.readers and r.sampled]
    if out is None or not back:
        why = "no ring of its own could be polled: no worker process, or not readable"
        return [LayerTime(layer=phase, per="step", how=why) for phase in _PHASES], 0
    reply = max(back, key=lambda r: r.published)
    spent, answers = _spent(out, reply)
    steps = max(answers, reply.published)
    if not out.moved or not steps:
        why = "no step was seen within the window"
        return [LayerTime(layer=phase, per="step", how=why) for phase in _PHASES], 0
    polled = out.segment.polled_s
    every = polled / out.segment.polls if out.segment.polls else 0.0
    coarse = f", coarse: a step takes {polled / steps * 1000:.1f} ms" if polled / steps < _COARSE_S else ""
    how = f"rings polled every {every * 1000:.1f} ms{coarse}"
    words = {"engine": "scheduling, or nothing to do", "compute": "all ranks together"}
    return [
        LayerTime(
            layer=phase,
            per="step",
            seconds=spent[phase] / steps,
            share=spent[phase] / polled,
            how=f"{words[phase]}; {how}" if phase in words else how,
        )
        for phase in _PHASES
    ], steps


def _spent(out: Ring, reply: Ring) -> tuple[dict[str, float], int]:
    """Seconds in each phase, and the answers that were seen to come."""
    events = sorted(
        [(t, False, state) for t, state in out.history] + [(t, True, state) for t, state in reply.history],
        key=lambda event: event[0],
    )
    end = max(out.segment.polled_s, events[-1][0])
    spent = dict.fromkeys(_PHASES, 0.0)
    phase = "engine"
    before: dict[bool, RingState] = {}
    answers = 0
    for n, (t, answered, state) in enumerate(events):
        # The first state of a ring is no event: it was so before.
        fresh = before.setdefault(answered, state) != state
        before[answered] = state
        phase = _phase(phase, answered, fresh, state)
        answers += answered and fresh and bool(state.pending)
        until = events[n + 1][0] if n + 1 < len(events) else end
        spent[phase] += max(0.0, until - t)
    return spent, answers


def _phase(before: str, answered: bool, fresh: bool, state: RingState) -> str:
    """What the step is in once a ring has come to `state`."""
    if answered:
        return "reply" if state.pending else "engine" if before == "reply" or fresh else before
    if state.pending:
        return "ring wait"
    # Read by all: they compute, unless the answer has come between two looks.
    return "compute" if before == "ring wait" or fresh else before


def _client(case: Case) -> LayerTime:
    """What clients have not taken is known in bytes alone."""
    ports: Sequence[int] = case.scene.http_ports
    waiting = sum(
        s.samples[-1].send_q if s.samples else s.send_q or 0
        for s in case.scene.snapshot.sockets
        if s.family != "unix" and s.state != "LISTEN" and s.port in ports
    )
    return LayerTime(
        layer="client",
        per="request",
        how=f"not known: when a client reads shows nowhere here; {waiting} bytes of answers wait in the kernel",
    )

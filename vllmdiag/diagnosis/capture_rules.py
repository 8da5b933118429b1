"""How far each rank has come in the capture of CUDA graphs, as DEBUG lines of its log tell."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.logs import LogEvent
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.titles import from_label

from . import write
from .logs import event_words, server_waits

_STANDS_S = 10.0
"""One size takes a second or less: ranks that part for this long do not go on."""
_TOKENS = re.compile(r"num_tokens=(\d+)")


def capture_words(snapshot: Snapshot) -> list[str]:
    """The last size that each rank has begun with; empty where all say the same, or fewer than two say one."""
    last = _last_sizes(snapshot)
    if len({event.groups["shape"] for event in last}) < 2:
        return []
    return [f"{event.label or f'pid {event.pid}'} began last with {_size(event)}" for event in last][:8]


def capture_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Ranks whose last sizes differ, while the server that waits for them goes on counting."""
    words, last = capture_words(snapshot), _last_sizes(snapshot)
    waits = [event for event in server_waits(snapshot) if event.at is not None]
    begun = [e.at for e in last if e.at is not None]
    if not words or not waits or not begun:
        return
    stood = max(e.at or 0.0 for e in waits) - max(begun)
    if stood < _STANDS_S:
        return
    first = last[0]
    identity = from_label(first.label)
    ranks = identity.ranks if identity is not None else {}
    who = Subject(role="Worker", pid=first.pid, rank=ranks, label=first.label or f"pid {first.pid}")
    yield write.finding(
        "cudagraph-capture-stuck",
        who,
        f"ranks stand at different sizes in the capture of CUDA graphs, for {stood:.0f} s: {'; '.join(words[:4])}",
        evidence=[*words, event_words(waits[-1])],
        chain=(Link(subject=who, doing="captures a CUDA graph"),),
        confidence="medium",
    )


def _size(event: LogEvent) -> str:
    shape = event.groups["shape"]
    found = _TOKENS.search(shape)
    return f"{found[1]} tokens" if found is not None else shape


def _last_sizes(snapshot: Snapshot) -> list[LogEvent]:
    """The last size of each process of a start-up that has not ended."""
    starting = (event for log in snapshot.logs if not log.served for event in log.phases)
    return [event for event in starting if event.kind == "capture_size" and (event.label or event.pid)]

"""Layer 5: an API server that does not take the outputs of its engine. They pile up before it, or inside it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from vllmdiag.model.diagnosis import Finding
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.instances import Member

from .activity import ThreadView
from .case import Case
from .rings import BROADCAST

_SENDS = ("send", "send_multipart")
_MANY_CHANGES = 50
"""Changes of the broadcast ring within a window: so many steps do not pass without a token or a block of the cache."""
_POINTS = 5
"""Of the window, at each of which the server must have grown. Two samples in a row may be only a moment apart."""
_BLOCKS_IN_USE = "kv_cache_usage_perc"
"""A prefill in chunks makes steps and no token; this moves with it."""


def output_findings(case: Case) -> Iterator[Finding]:
    """For each engine whose outputs are not taken."""
    for engine in case.scene.engines:
        if case.starting or case.halted(engine.pid):
            continue
        view, unread = sending(case, engine), unread_outputs(case, engine)
        if view is not None and unread:
            yield _piles_up_before(case, engine, view, unread)
        elif (server := _piling_up_inside(case, engine)) is not None:
            yield _piles_up_inside(case, engine, server)


def sending(case: Case, engine: Member) -> ThreadView | None:
    """The output thread of an engine that was inside a send in every dump: the socket takes no more."""
    for view in case.acts[engine.pid].threads:
        own = any("process_output_socket" in frame.name for frame in view.frames)
        if own and view.still and view.frames[0].name.rpartition(".")[2] in _SENDS:
            return view
    return None


def unread_outputs(case: Case, engine: Member) -> tuple[Socket, ...]:
    """Sockets of live API servers with bytes of this engine that no sample saw read."""
    scene = case.scene
    servers = {m.pid for m in scene.servers if not case.halted(m.pid)}
    ends = {(s.local, s.remote): s for s in scene.snapshot.sockets if s.family != "unix"}
    found = []
    for sock in scene.snapshot.sockets:
        if sock.state != "ESTAB" or not servers & set(sock.pids) or len(sock.samples) < 2:
            continue
        unix = sock.family == "unix"
        peer = scene.sockets_by_inode.get(sock.peer_inode or 0) if unix else ends.get((sock.remote, sock.local))
        if peer is not None and engine.pid in peer.pids and all(s.recv_q > 0 for s in sock.samples):
            found.append(sock)
    return tuple(found)


def _piles_up_before(case: Case, engine: Member, view: ThreadView, unread: tuple[Socket, ...]) -> Finding:
    server = next(m for m in case.scene.servers if m.pid in unread[0].pids)
    queued = unread[0].samples[-1].recv_q
    return case.finding(
        "api-not-reading",
        server.pid,
        f"{server.label} (pid {server.pid}) does not read the outputs of {engine.label}, whose output thread waits in"
        " its send",
        evidence=[
            f"{queued} B from {engine.label} at {server.label}, not read in any of {len(unread[0].samples)} samples",
            f"thread {view.name} of {engine.label} in {view.frames[0].name} in {view.dumps} of {view.dumps} dumps",
            f"{server.label}: {case.acts[server.pid].doing}",
        ],
        chain=case.chain(server.pid),
    )


def _piling_up_inside(case: Case, engine: Member) -> Member | None:
    """The server that grows while the engine makes steps for requests and nothing of them is counted."""
    scrapes = case.scene.snapshot.metrics
    changes = sum(r.moved for r in case.rings if r.queue == BROADCAST and r.writer == engine.pid)
    if len(scrapes) < 2 or changes < _MANY_CHANGES or not case.progress[engine.pid].gauges:
        return None
    if _BLOCKS_IN_USE not in scrapes[0].values or any(s.values != scrapes[0].values for s in scrapes[1:]):
        return None
    return next((m for m in case.scene.servers if not case.halted(m.pid) and _grows(case, m)), None)


def _sizes(case: Case, server: Member) -> list[int]:
    return [s.rss for s in case.scene.processes[server.pid].samples]


def _grows(case: Case, server: Member) -> bool:
    """It never shrank, and had grown at each of several points of the window."""
    sizes = _sizes(case, server)
    n = min(_POINTS, len(sizes))
    if n < 3:
        return False
    points = [sizes[round(i * (len(sizes) - 1) / (n - 1))] for i in range(n)]
    return all(a < b for a, b in pairwise(points)) and all(a <= b for a, b in pairwise(sizes))


def _piles_up_inside(case: Case, engine: Member, server: Member) -> Finding:
    sizes = _sizes(case, server)
    progress = case.progress[engine.pid]
    return case.finding(
        "api-not-reading",
        server.pid,
        f"{engine.label} works, and {server.label} (pid {server.pid}) counts nothing of it and grows: it does not take"
        " its outputs",
        evidence=[
            *progress.moved[:2],
            f"no figure of /metrics has changed, {progress.gauges[0]}",
            f"{server.label} grew all the time, by {(sizes[-1] - sizes[0]) / 2**20:.1f} MiB",
        ],
        chain=case.chain(server.pid),
        confidence="medium",
    )

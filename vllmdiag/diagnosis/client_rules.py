"""Layer 5: the API server's event loop, and clients that do not read."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.sockets import Socket

from .case import Case

_FULL_BYTES = 16 << 10
"""Less than this in a send queue is a packet on its way."""


def client_findings(case: Case) -> Iterator[Finding]:
    """All findings of layer 5."""
    yield from _loop_blocked(case)
    yield from _not_reading(case)


def _loop_blocked(case: Case) -> Iterator[Finding]:
    probes = [p for p in case.scene.snapshot.http if p.path == "/health"]
    silent = bool(probes) and all(p.status is None and p.error == "timeout" for p in probes)
    if not silent or case.starting:
        return
    for server in case.scene.servers:
        act = case.acts[server.pid]
        if case.halted(server.pid) or not act.seen or act.state == "idle" or not act.still:
            continue
        yield case.finding(
            "api-loop-blocked",
            server.pid,
            f"the event loop of {server.label} (pid {server.pid}) is inside one call: {act.doing}",
            evidence=[
                f"/health: no answer in {probes[0].total_s or 0:.1f} s",
                f"{act.doing} in every stack, {act.cpu:.2f} cores",
            ],
            chain=case.chain(server.pid),
        )


def stuck_connections(case: Case) -> tuple[Socket, ...]:
    """Connections on the HTTP port whose answer lies in the send buffer over the whole window."""
    ports = set(case.scene.http_ports)
    return tuple(
        s
        for s in case.scene.snapshot.sockets
        if s.family != "unix" and s.port in ports and s.state != "LISTEN" and len(s.samples) >= 2 and _stuck(s)
    )


def _stuck(sock: Socket) -> bool:
    queued = [s.send_q for s in sock.samples]
    return min(queued) >= _FULL_BYTES and queued[-1] >= queued[0]


def _not_reading(case: Case) -> Iterator[Finding]:
    stuck = stuck_connections(case)
    if not stuck:
        return
    worst = max(stuck, key=lambda s: s.samples[-1].send_q)
    who = Subject(role="Client", label=f"client {worst.remote}")
    owner = next((m for m in case.scene.servers if m.pid in worst.pids), None)
    chain = [Link(subject=who, doing="does not read")]
    if owner is not None:
        chain.insert(0, case.link(owner.pid, "has output to send"))
    others = f" and {len(stuck) - 1} more" if len(stuck) > 1 else ""
    yield case.finding(
        "client-not-reading",
        who,
        f"{who.label}{others} does not read: {worst.samples[-1].send_q} B of answer lie in the send buffer",
        evidence=[
            f"{s.local} -> {s.remote} {s.state}: Send-Q {', '.join(str(x.send_q) for x in s.samples)} B over the window"
            + ("" if s.pids else ", owned by no process any more")
            for s in stuck[:5]
        ],
        chain=chain,
    )

"""Layer 5: the API server's event loop, clients that do not read, and clients whose leaving nobody has noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.signatures import state_of

from .activity import Activity
from .case import Case
from .motion import tokens_for_somebody

_FULL_BYTES = 16 << 10
"""Less than this in a send queue is a packet on its way."""
_FULL_CORE = 0.95
_NOTICED_S = 1.5
_LOOP = re.compile(r"(?:^|/)(?:asyncio|uvloop|selectors\.py)")


def client_findings(case: Case) -> Iterator[Finding]:
    """All findings of layer 5."""
    yield from _loop_blocked(case)
    yield from _not_reading(case)
    yield from _left_unnoticed(case)
    yield from _nobody_waits(case)


def _loop_blocked(case: Case) -> Iterator[Finding]:
    probes = [p for p in case.scene.probes if p.path == "/health"]
    silent = bool(probes) and all(p.status is None and p.error == "timeout" for p in probes)
    if case.starting:
        return
    for server in case.scene.servers:
        act = case.acts[server.pid]
        if case.halted(server.pid) or not act.seen or act.state == "idle":
            continue
        if not silent and case.scene.snapshot.pasted:
            yield from _loop_full(case, server.pid)
        if not silent or _full_table(case, server.pid) or not (act.still or _one_call(act)):
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


def _full_table(case: Case, pid: int) -> bool:
    """No descriptor is left to accept a request with: that it goes unanswered, and is complained of, follows."""
    process = case.scene.processes[pid]
    limits = process.limits
    return not isinstance(limits, Missing) and limits.nofile is not None and (process.n_fds or 0) >= limits.nofile


def _one_call(act: Activity) -> bool:
    """Every look shows the loop inside the same call, wherever in it."""
    if act.main is None or act.main.dumps < 2 or len(act.main.stacks) < act.main.dumps:
        return False
    outward = [[(f.name, f.file, f.line) for f in reversed(stack.frames)] for stack in act.main.stacks]
    common = [frames[0] for frames in takewhile(lambda f: len(set(f)) == 1, zip(*outward, strict=False))]
    return bool(common) and _LOOP.search(common[-1][1]) is None and any(_LOOP.search(file) for _, file, _ in common)


def _loop_full(case: Case, pid: int) -> Iterator[Finding]:
    """Nobody has asked whether it answers: its only thread has no time left, and no look shows it at rest."""
    act = case.acts[pid]
    looks = act.main.stacks if act.main is not None else ()
    resting = [s for s in looks if (m := state_of(s.frames, "APIServer")) is not None and m.signature.kind == "idle"]
    if len(looks) < 2 or resting or act.cpu < _FULL_CORE:
        return
    yield case.finding(
        "api-loop-blocked",
        pid,
        f"the event loop of {case.label(pid)} (pid {pid}) is never at rest, and outputs wait for it: {act.doing}",
        evidence=[
            f"{act.cpu:.2f} cores by its one thread",
            f"{act.doing}, not at rest in {len(looks)} of {len(looks)} stacks",
        ],
        chain=case.chain(pid),
        severity="warning",
        confidence="medium",
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


def _left_unnoticed(case: Case) -> Iterator[Finding]:
    """Clients have closed, the server does not close in turn, and the engine works on."""
    ports = set(case.scene.http_ports)
    servers = {m.pid for m in case.scene.servers if not case.halted(m.pid)}
    answers = any(p.status is not None for p in case.scene.probes)
    left = [
        s
        for s in case.scene.snapshot.sockets
        if s.family != "unix" and s.port in ports and servers & set(s.pids) and _half_closed(s)
    ]
    works = [words for progress in case.progress.values() for words in progress.moved]
    if not left or not answers or not works or case.starting:
        return  # a loop that is blocked, or work that stands, is the reason then
    if case.window_s < _NOTICED_S and not case.scene.snapshot.pasted:
        return  # a busy loop may take as long to come to it
    who = Subject(role="Client", label=f"client {left[0].remote}")
    owner = next(pid for pid in left[0].pids if pid in servers)
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    yield case.finding(
        "abort-not-seen",
        who,
        f"{who.label}{others} has closed its connection; {case.label(owner)} (pid {owner}) has not noticed,"
        " and the engine works on",
        evidence=[
            *(f"{s.local} <- {s.remote}: CLOSE-WAIT in all of {len(s.samples)} samples" for s in left[:5]),
            *works[:3],
        ],
        chain=[Link(subject=who, doing="has closed its connection"), case.link(owner, "has not noticed")],
        pid=str(owner),
    )


def _nobody_waits(case: Case) -> Iterator[Finding]:
    """Tokens are made, and the table of sockets shows no client that could take them.

    Said of pasted evidence only: a look at a live server may find a request of the background (POST /v1/responses).
    """
    snapshot, servers = case.scene.snapshot, {m.pid for m in case.scene.servers}
    works = tokens_for_somebody(snapshot)
    if not snapshot.pasted or not works:
        return
    table = [s for s in snapshot.sockets if s.family != "unix"]
    proxies = {p.pid for p in snapshot.processes if p.comm == "docker-proxy"}
    held = next((s for s in table if s.state == "CLOSE-WAIT" and proxies & set(s.pids)), None)
    ports = {s.port for s in table if s.state == "LISTEN" and s.port is not None and servers & set(s.pids)}
    connected = [s for s in table if s.state == "ESTAB" and s.port in ports]
    if held is not None:
        who = Subject(role="Client", label=f"client {held.remote}")
        pid = next(pid for pid in held.pids if pid in proxies)
        summary = f"{who.label} has closed its connection; docker-proxy (pid {pid}) still holds the one to the server"
        told = f"{held.local} <- {held.remote}: CLOSE-WAIT, of docker-proxy"
    elif ports and not connected:
        who = Subject(role="Client", label="the client")
        summary = "requests run and no client is connected: that one has gone was not noticed"
        told = f"no connection to port {', '.join(map(str, sorted(ports)))} in the table of sockets"
    else:
        return
    yield case.finding(
        "abort-not-seen",
        who,
        f"{summary}, and the engine works on",
        evidence=[told, *works],
        chain=[Link(subject=who, doing="has gone")],
        confidence="medium",
    )


def _half_closed(sock: Socket) -> bool:
    return len(sock.samples) >= 2 and all(s.state == "CLOSE-WAIT" for s in sock.samples)

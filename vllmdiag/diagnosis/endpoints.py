"""Who binds which address and who is connected to it, by role. Who is at its ends tells what an address is for."""

from __future__ import annotations

from vllmdiag.model.sockets import Socket
from vllmdiag.model.view import ConnectionView, EndpointView, Party

from .case import Case

_HTTP_BACKLOG = 2048


def endpoint_views(case: Case) -> tuple[EndpointView, ...]:
    """Every address that a member binds: ipc first, then TCP, in tree order of the binder."""
    place = {m.pid: i for i, m in enumerate(case.scene.instance.members)}
    bound = sorted(
        case.scene.listeners,
        key=lambda s: (s.family != "unix", min((place.get(p, 99) for p in s.pids), default=99), s.local),
    )
    return tuple(_endpoint(case, listener) for listener in bound)


def _endpoint(case: Case, listener: Socket) -> EndpointView:
    binder = next((p for p in listener.pids if p in case.scene.members), None)
    connections = _connections(case, listener)
    name, pattern = _purpose(case, listener, binder, connections)
    unix = listener.family == "unix"
    return EndpointView(
        name=name,
        address=("ipc://" if unix else "tcp://") + listener.local,
        pattern=pattern,
        binder=_party(case, binder) if binder is not None else None,
        path_exists=listener.local not in case.scene.snapshot.ipc_paths_missing if unix else None,
        waiting=listener.recv_q,
        backlog=listener.send_q,
        connections=connections,
        expected=_expected(case, name, binder, connections),
    )


def _party(case: Case, pid: int) -> Party:
    return Party(label=case.label(pid), pid=pid)


def _connections(case: Case, listener: Socket) -> tuple[ConnectionView, ...]:
    scene = case.scene
    found = []
    by_ends = {(s.local, s.remote): s for s in scene.snapshot.sockets if s.family != "unix" and s.state != "LISTEN"}
    for sock in scene.snapshot.sockets:
        if sock.state == "LISTEN" or sock.family != listener.family:
            continue
        if listener.family == "unix":
            if sock.local != listener.local:
                continue
            peer = scene.sockets_by_inode.get(sock.peer_inode or 0)
        else:
            if sock.port != listener.port or (sock.pids and not set(sock.pids) & set(listener.pids)):
                continue
            peer = by_ends.get((sock.remote, sock.local))
        pid = next(iter(peer.pids), None) if peer is not None else None
        who = _party(case, pid) if pid is not None else Party(label=sock.remote or "?")
        found.append(
            ConnectionView(
                peer=who,
                state=sock.state,
                to_peer=_sum(sock.send_q if listener.family != "unix" else 0, peer.recv_q if peer else None),
                from_peer=_sum(sock.recv_q, peer.send_q if peer and listener.family != "unix" else 0),
                stuck=_stuck(sock, peer),
            )
        )
    return tuple(sorted(found, key=lambda c: (c.peer.label, c.peer.pid or 0, c.state)))


def _sum(*parts: int | None) -> int | None:
    known = [p for p in parts if p is not None]
    return sum(known) if known else None


def _stuck(sock: Socket, peer: Socket | None) -> bool:
    """Bytes wait to be read at either end in every sample and do not become fewer."""
    for end in (sock, peer):
        if end is not None and len(end.samples) >= 2:
            queued = [s.recv_q for s in end.samples]
            if min(queued) > 0 and queued[-1] >= queued[0]:
                return True
    return False


def _purpose(
    case: Case, listener: Socket, binder: int | None, connections: tuple[ConnectionView, ...]
) -> tuple[str, str]:
    """(what it is for, socket pattern), from role of the binder, roles of the peers and, for TCP, the backlog."""
    scene = case.scene
    role = scene.members[binder].role if binder is not None else ""
    peers = {scene.members[c.peer.pid].role for c in connections if c.peer.pid in scene.members}
    if listener.family != "unix":
        if listener.port in scene.http_ports and role in ("APIServer", "Launcher"):
            return "HTTP", ""
        if listener.send_q in (100, 128):
            return _zmq_purpose(role, peers)
        return ("HTTP" if listener.send_q == _HTTP_BACKLOG else "gloo or TCPStore"), ""
    return _zmq_purpose(role, peers)


def _zmq_purpose(role: str, peers: set[str]) -> tuple[str, str]:
    if role in ("APIServer", "Driver", "Launcher"):
        return (
            ("engine input or output", "ROUTER <- DEALER or PULL <- PUSH")
            if peers != set()
            else ("engine input, output or handshake", "")
        )
    if role == "EngineCore":
        return "broadcast ring: wake-up or overflow", "PUB -> SUB or XPUB -> SUB"
    if role in ("Worker", "RayWorker"):
        if peers == {"EngineCore"}:
            return "response ring: wake-up or overflow", "PUB -> SUB or XPUB -> SUB"
        return "group ring: wake-up or overflow", "PUB -> SUB or XPUB -> SUB"
    if role == "DPCoordinator":
        return "coordinator: publish or output", "XPUB -> SUB or PULL <- PUSH"
    return "unknown", ""


def _expected(case: Case, name: str, binder: int | None, connections: tuple[ConnectionView, ...]) -> tuple[Party, ...]:
    """Members that belong at the other end and are not connected; nothing is expected before the start-up is over."""
    if binder is None or case.starting:
        return ()
    scene = case.scene
    present = {c.peer.pid for c in connections}
    if name.startswith("broadcast ring"):
        wanted = [w.pid for w in scene.instance.workers_of(binder)]
    elif name.startswith("response ring"):
        engine = scene.members[binder].engine_pid
        wanted = [engine] if engine is not None else []
    else:
        return ()
    return tuple(_party(case, pid) for pid in wanted if pid not in present)

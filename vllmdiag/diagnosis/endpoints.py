"""Who binds which address and who is connected to it, by role. Who is at its ends tells what an address is for."""

from __future__ import annotations

from collections import defaultdict

from vllmdiag.model.sockets import Socket
from vllmdiag.model.view import ConnectionView, EndpointView, Party
from vllmdiag.vllm.endpoints import Endpoint, between, endpoints, kind_of_listener

from .case import Case
from .nodes import absent

STORE = "store at the master port"


def endpoint_views(case: Case) -> tuple[EndpointView, ...]:
    """Every address that a member binds: ipc first, then TCP, in tree order of the binder."""
    place = {m.pid: i for i, m in enumerate(case.scene.instance.members)}
    bound = sorted(
        case.scene.listeners,
        key=lambda s: (s.family != "unix", min((place.get(p, 99) for p in s.pids), default=99), s.inode),
    )
    seen = [(listener, _binder(case, listener), _connections(case, listener)) for listener in bound]
    purposes = _purposes(case, seen)
    return tuple(
        _endpoint(case, listener, binder, connections, purposes[listener.inode])
        for listener, binder, connections in seen
    )


def _binder(case: Case, listener: Socket) -> int | None:
    return next((p for p in listener.pids if p in case.scene.members), None)


def _endpoint(
    case: Case, listener: Socket, binder: int | None, connections: tuple[ConnectionView, ...], purpose: tuple[str, str]
) -> EndpointView:
    name, pattern = purpose
    unix = listener.family == "unix"
    probe = next((p for p in case.scene.snapshot.zmtp if p.inode == listener.inode), None)
    return EndpointView(
        name=name,
        address=("ipc://" if unix else "tcp://") + listener.local,
        pattern=pattern or (probe.socket_type if probe is not None else ""),
        binder=_party(case, binder) if binder is not None else None,
        path_exists=listener.local not in case.scene.snapshot.ipc_paths_missing if unix else None,
        waiting=listener.recv_q,
        backlog=listener.send_q,
        connections=connections,
        expected=_expected(case, name, binder, connections),
        probe=probe,
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


_Seen = tuple[Socket, int | None, tuple[ConnectionView, ...]]


def _purposes(case: Case, seen: list[_Seen]) -> dict[int, tuple[str, str]]:
    """(name, socket pattern) by inode of the listener.

    Several endpoints may have the same pair of roles at their ends (input and output of an engine, overflow and wake-up
    of a ring). vLLM opens them in a fixed order, and the kernel numbers sockets in the order they are opened, as a
    rule: where all of them have told their types (``--probe-zmq``), these are surer.
    """
    scene = case.scene
    told = {p.inode: p.socket_type for p in scene.snapshot.zmtp if p.socket_type}
    alike: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    named: dict[int, tuple[str, str]] = {}
    for listener, binder, connections in seen:
        peers = sorted({scene.members[c.peer.pid].role for c in connections if c.peer.pid in scene.members})
        tcp = _tcp_purpose(case, listener, binder)
        named[listener.inode] = (tcp or "not told: nobody is connected", "")
        if binder is not None and not peers and tcp is None and listener.family != "unix":
            named[listener.inode] = _of_another_node(case, binder) or named[listener.inode]
        if binder is not None and peers and (listener.family == "unix" or tcp is None):
            alike[binder, peers[0], "ipc" if listener.family == "unix" else "tcp"].append(listener.inode)
    for (binder, peer, transport), inodes in alike.items():
        kinds = [
            e
            for e in between(scene.members[binder].role, peer, scene.version)
            if transport in e.transport and (e.phase == "serving" or case.starting)
        ]
        for inode, fitting in _fitting(sorted(inodes), kinds, told).items():
            if fitting:
                named[inode] = (
                    " or ".join(dict.fromkeys(e.name for e in fitting)),
                    " or ".join(dict.fromkeys(e.pattern for e in fitting)),
                )
    return named


def _of_another_node(case: Case, binder: int) -> tuple[str, str] | None:
    """What a TCP endpoint without a peer on this machine is in a job of several nodes, where only one kind can be."""
    options, role = case.scene.options, case.scene.members[binder].role
    if options is None or options.nnodes <= 1:
        return None
    kinds = [e for e in endpoints(case.scene.version) if e.binds == role and e.transport == ("tcp",)]
    return (kinds[0].name, kinds[0].pattern) if len(kinds) == 1 else None


def _fitting(inodes: list[int], kinds: list[Endpoint], told: dict[int, str]) -> dict[int, list[Endpoint]]:
    """What each may be: one kind where there are as many kinds as endpoints, else all of them."""
    if len(kinds) != len(inodes):
        return dict.fromkeys(inodes, kinds)
    if sorted(told.get(inode, "") for inode in inodes) == sorted(kind.bind_type for kind in kinds):
        inodes = sorted(inodes, key=told.__getitem__)
        kinds = sorted(kinds, key=lambda kind: kind.bind_type)
    return {inode: [kind] for inode, kind in zip(inodes, kinds, strict=True)}


def _tcp_purpose(case: Case, listener: Socket, binder: int | None) -> str | None:
    """What a TCP listener is by its port or its backlog; None for one of ZMQ, and for a path."""
    if listener.family == "unix":
        return None
    role = case.scene.members[binder].role if binder is not None else ""
    if listener.port in case.scene.http_ports and role in ("APIServer", "Launcher"):
        return "HTTP"
    options = case.scene.options
    if options is not None and options.nnodes > 1 and listener.port == options.master_port:
        return STORE
    kind = kind_of_listener(listener.send_q or 0)
    if kind is None:
        return "not told"
    return None if kind.kind == "zmq" else {"http": "HTTP", "group": "gloo or TCPStore"}[kind.kind]


def _expected(case: Case, name: str, binder: int | None, connections: tuple[ConnectionView, ...]) -> tuple[Party, ...]:
    """Who belongs at the other end and is not connected. While it starts, only those at the meeting of the ranks."""
    scene = case.scene
    present = {c.peer.pid for c in connections}
    if name == STORE:
        lost = absent(case)
        here = tuple(_party(case, w.pid) for w in scene.workers if w.pid not in {*present, binder})
        return (*here, *((Party(label=lost.label),) if lost is not None else ()))
    if binder is None or case.starting:
        return ()
    if name.startswith(("engine ", "coordinator back ")):
        wanted = [e.pid for e in scene.engines]
    elif name.startswith("coordinator front "):
        wanted = [s.pid for s in scene.servers]
    elif name.startswith("broadcast "):
        wanted = [w.pid for w in scene.instance.workers_of(binder)]
    elif name.startswith("remote broadcast"):
        return _remote_readers(case, connections)
    elif name.startswith("response "):
        engine = scene.members[binder].engine_pid
        wanted = [engine] if engine is not None else []
    else:
        return ()
    return tuple(_party(case, pid) for pid in wanted if pid not in present)


def _remote_readers(case: Case, connections: tuple[ConnectionView, ...]) -> tuple[Party, ...]:
    """Ranks of other nodes that the arguments promise and that are not connected. Which they are is not told."""
    options = case.scene.options
    if options is None:
        return ()
    here = {w.pid for w in case.scene.workers}
    far = [c for c in connections if c.peer.pid not in here]
    lost = options.world_size - len(here) - len(far)
    return (Party(label=f"{lost} of {options.world_size - len(here)} ranks of other nodes"),) if lost > 0 else ()

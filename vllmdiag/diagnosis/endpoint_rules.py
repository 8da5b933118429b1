"""Layer 2: addresses. Paths that are gone or too long, ports that others hold, interfaces that do not exist."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Subject
from vllmdiag.model.startup import Network, TakenPort
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.stages import socket_path_bytes, unix_path_limit

from .case import Case


def endpoint_findings(case: Case) -> Iterator[Finding]:
    """What is wrong with the endpoints of an instance, starting or not."""
    if not case.starting:
        yield from _disconnected(case)
    yield from _port_shared(case)
    yield from _paths_removed(case)


def certain_findings(case: Case) -> Iterator[Finding]:
    """What will end a start-up whatever moves now: it is only a matter of time until it gets there."""
    yield from _path_too_long(case)
    yield from _ports_taken(case)
    yield from _no_such_interface(case)


def _disconnected(case: Case) -> Iterator[Finding]:
    """Server and engine both run, and no connection exists between them."""
    scene = case.scene
    fronts = [m for m in scene.instance.of("APIServer", "Driver") if not case.dead(m.pid)]
    for engine in scene.engines:
        if case.halted(engine.pid) or not fronts or not scene.sockets_known(engine.pid) or not case.in_loop(engine):
            continue
        seen = [f for f in fronts if scene.sockets_known(f.pid)]
        if seen and len(seen) == len(fronts) and not any((f.pid, engine.pid) in scene.connected for f in seen):
            yield case.finding(
                "endpoint-gone",
                engine.pid,
                f"{engine.label} (pid {engine.pid}) has no connection to any of its servers",
                evidence=[
                    f"no established socket between {engine.pid} and {', '.join(str(f.pid) for f in seen)}",
                    *(f"path is gone: {p}" for p in scene.snapshot.ipc_paths_missing[:3]),
                ],
                chain=case.chain(seen[0].pid, engine.pid),
                confidence="medium",
            )


def _paths_removed(case: Case) -> Iterator[Finding]:
    paths = case.scene.snapshot.ipc_paths_missing
    if not paths:
        return
    owners = {pid for path, (pid, _) in case.scene.ipc_peers.items() if path in paths}
    unconnected = [p for p in paths if p in case.scene.ipc_peers and not case.scene.ipc_peers[p][1]]
    subject = case.scene.subject(min(owners)) if owners else Subject(role="Host", label="host")
    yield case.finding(
        "ipc-path-removed",
        subject,
        f"{len(paths)} socket files were removed; "
        + ("connections that exist go on" if not unconnected else f"{len(unconnected)} of them have nobody connected"),
        evidence=list(paths[:3]),
    )


def _front(case: Case) -> int:
    """The process that binds what the instance offers."""
    fronts = case.scene.instance.of("APIServer", "Launcher", "Driver")
    return fronts[0].pid if fronts else case.scene.instance.roots[0]


def _path_too_long(case: Case) -> Iterator[Finding]:
    name = next((n for n in ("VLLM_RPC_BASE_PATH", "TMPDIR") if case.scene.environ(n)), None)
    base = case.scene.environ(name) if name is not None else None
    if base is None or socket_path_bytes(base) <= unix_path_limit():
        return
    if any(s.family == "unix" and s.local.startswith("/") for s in case.scene.listeners):
        return  # it has found a place
    front = _front(case)
    yield case.finding(
        "ipc-path-too-long",
        front,
        f"socket paths below {name} would have {socket_path_bytes(base)} bytes; a unix socket takes"
        f" {unix_path_limit()}",
        evidence=[
            f"{name}={base} ({len(base.encode())} bytes), and vLLM adds a slash and a name of 36",
            "no socket of it is bound",
            *_log(case, "path_too_long"),
        ],
        chain=case.chain(front),
    )


def _ports_taken(case: Case) -> Iterator[Finding]:
    mine = {s.port for s in case.scene.listeners if s.family != "unix"}
    for taken in case.scene.snapshot.taken_ports:
        if taken.port in mine or (not taken.pids and case.blind_to_servers):
            continue  # its own, or perhaps its own
        front = _front(case)
        who = _named(taken)
        yield case.finding(
            "port-conflict",
            front,
            f"port {taken.port} ({taken.purpose}) is taken by {who}",
            evidence=[
                f"{who} listens on {taken.address}:{taken.port}",
                f"{case.label(front)} (pid {front}) wants it as its {taken.purpose} port and has not bound it",
                *_kin(case, taken),
                *_log(case, "address_in_use"),
            ],
            chain=case.chain(front),
        )


def _port_shared(case: Case) -> Iterator[Finding]:
    """Somebody else accepts on the HTTP port beside the server: both have asked the kernel for it (SO_REUSEPORT)."""
    ours = [s for s in case.scene.listeners if s.family != "unix" and s.port in case.scene.http_ports]
    for taken in case.scene.snapshot.taken_ports:
        own = [s for s in ours if s.port == taken.port and _gets_its_clients(taken.address, s.local)]
        if not own or not taken.pids or set(taken.pids) & set(case.scene.members):
            continue
        front, who = _front(case), _named(taken)
        yield case.finding(
            "port-conflict",
            front,
            f"{who} listens on port {taken.port} too: the clients that the kernel gives to it never reach"
            f" {case.label(front)} (pid {front})",
            evidence=[
                f"{who} listens on {taken.address}:{taken.port}",
                *(f"{', '.join(case.label(pid) for pid in s.pids)} listens on {s.local}" for s in own),
                *_kin(case, taken),
            ],
            chain=case.chain(front),
        )


def _gets_its_clients(theirs: str, ours: str) -> bool:
    """Of two listeners the one with the same address shares the connections, and one with a narrower takes its own."""
    try:
        other = ipaddress.ip_address(theirs)
        own = ipaddress.ip_address(ours.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return other == own or (own.is_unspecified and own.version == other.version)


def _named(taken: TakenPort) -> str:
    return f"{taken.name or 'process'} (pid {taken.pids[0]})" if taken.pids else "a process that is not visible"


def _kin(case: Case, taken: TakenPort) -> list[str]:
    others = [i for i in case.scene.others if set(i.pids) & set(taken.pids)]
    return [f"pid {taken.pids[0]} belongs to another vLLM{' without a server' if i.orphaned else ''}" for i in others]


def _network_of(case: Case, pid: int) -> Network | None:
    return next((n for n in case.scene.snapshot.networks if pid in n.pids), None)


def _no_such_interface(case: Case) -> Iterator[Finding]:
    """gloo takes the names of GLOO_SOCKET_IFNAME as they are, and fails where there is no such interface."""
    for process in case.scene.processes.values():
        network = _network_of(case, process.pid)
        names = [name for name in process.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if network is None or not names:
            continue
        there = [i.name for i in network.interfaces]
        wrong = [name for name in names if name not in there]
        if wrong:
            yield case.finding(
                "wrong-interface",
                process.pid,
                f"GLOO_SOCKET_IFNAME names {', '.join(wrong)}, and {case.label(process.pid)} has no such interface",
                evidence=[f"interfaces of pid {process.pid}: {', '.join(there)}", *_log(case, "mesh_failed")],
                chain=case.chain(process.pid),
            )
            return


def interface_faults(case: Case) -> list[str]:
    """Why ranks may not find each other, in words: only to be asked where they do not."""
    words = []
    for process in case.scene.processes.values():
        network = _network_of(case, process.pid)
        if network is not None:
            words += _host_ip(process.environ, network) + _nccl_names(process.environ, network)
    options = case.scene.options
    spans = options is not None and (options.nnodes > 1 or (options.data_parallel_size_local or 0) > 0)
    words += (
        [f"log: {text}" for kind in ("loopback_fallback", "mesh_failed") for text in _log(case, kind)] if spans else []
    )
    words += _hanging_connects(case)
    return list(dict.fromkeys(words))


def _host_ip(environ: dict[str, str], network: Network) -> list[str]:
    address = environ.get("VLLM_HOST_IP", "")
    mine = {a for i in network.interfaces for a in i.addresses}
    if not address or not mine or address in mine or not _is_address(address):
        return []
    return [f"VLLM_HOST_IP={address} is no address of this network namespace ({', '.join(sorted(mine))})"]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _nccl_names(environ: dict[str, str], network: Network) -> list[str]:
    """NCCL_SOCKET_IFNAME: prefixes, ``=`` for exact names, ``^`` for all but these."""
    text = environ.get("NCCL_SOCKET_IFNAME", "")
    exact, names = text.startswith("="), [n for n in text.lstrip("=").split(",") if n]
    if not names or text.startswith("^"):
        return []
    there = [i.name for i in network.interfaces]
    fits = any(t == n if exact else t.startswith(n) for t in there for n in names)
    return [] if fits else [f"NCCL_SOCKET_IFNAME={text} fits none of the interfaces {', '.join(there)}"]


def _hanging_connects(case: Case) -> list[str]:
    """Connects of members that nobody answers, in every sample."""
    words = []
    for sock in case.scene.snapshot.sockets:
        hangs = sock.state == "SYN-SENT" and len(sock.samples) >= 2 and all(s.state == "SYN-SENT" for s in sock.samples)
        if hangs or (sock.state == "SYN-SENT" and not sock.samples):
            who = case.label(sock.pids[0]) if sock.pids else "somebody"
            loop = (
                " (loopback: never another machine)" if re.match(r"\[?(?:127\.|::1|::ffff:127\.)", sock.remote) else ""
            )
            words.append(f"{who} connects to {sock.remote} and gets no answer{loop}")
    return words


def _log(case: Case, kind: str) -> list[str]:
    """The last line of a kind in the log."""
    for line in reversed(case.scene.snapshot.log_lines):
        found = find(line.text, case.scene.version)
        if found is not None and found.kind.id == kind:
            return [f"log: {line.text}"]
    return []

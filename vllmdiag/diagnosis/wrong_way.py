"""Ranks that look for their peers the wrong way, told without any log: a proxy before them, or another interface."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot

from . import write
from .case import Case
from .logs import pid_words

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def proxied(snapshot: Snapshot) -> list[str]:
    """Processes that reach the address of their own node through a proxy, in words."""
    return [
        f"{name} is set for {pid_words(p.pid)}, and no_proxy does not cover {p.environ['VLLM_HOST_IP']}"
        for p in snapshot.processes
        for name in [next((n for n in _PROXIES if p.environ.get(n)), None)]
        if name is not None and p.environ.get("VLLM_HOST_IP") and not _covered(p)
    ][:2]


def _covered(process: Process) -> bool:
    host = process.environ["VLLM_HOST_IP"]
    listed = process.environ.get("no_proxy") or process.environ.get("NO_PROXY") or ""
    return any(_covers(entry.strip(), host) for entry in listed.split(","))


def _covers(entry: str, host: str) -> bool:
    if entry in ("*", host):
        return True
    try:
        return ip_address(host).is_loopback or ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and host.endswith("." + entry.lstrip("."))


def astray(snapshot: Snapshot) -> list[str]:
    """Connects that hang and leave by another interface than that of the node's own address, in words."""
    names = {a: i.name for n in snapshot.networks for i in n.interfaces for a in i.addresses}
    found = []
    for process in snapshot.processes:
        own = process.environ.get("VLLM_HOST_IP", "")
        if own not in names or any(process.environ.get(name) for name in _NAMES):
            continue
        for sock in snapshot.sockets:
            local = sock.local.rpartition(":")[0].strip("[]")
            if sock.state == "SYN-SENT" and process.pid in sock.pids and names.get(local, names[own]) != names[own]:
                found.append(
                    f"a connect of {pid_words(process.pid)} to {sock.remote} hangs: it leaves by {names[local]},"
                    f" and VLLM_HOST_IP={own} is of {names[own]}"
                )
    return found[:2]


def wrong_way_of(case: Case) -> Iterator[Finding]:
    """The same for pasted evidence of a server that is not seen to have come up."""
    engines = case.scene.engines
    serves = case.listening or any(case.in_loop(e) or case.progress[e.pid].moved for e in engines)
    if case.scene.snapshot.pasted and not serves and not case.starting_motion:
        yield from wrong_way_findings(case.scene.snapshot)


def wrong_way_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """What addresses and proxies tell by themselves."""
    hanging, through = astray(snapshot), proxied(snapshot)
    alone = not (snapshot.logs or snapshot.http)  # a proxy by itself is no fault of a server that answers or says more
    if not hanging and not (through and alone):
        return
    process = next(p for p in snapshot.processes if p.environ.get("VLLM_HOST_IP"))
    known = process.pid if process.pid > 0 else None
    who = Subject(role="Other", pid=known, label=process.comm or pid_words(process.pid))
    unset = [f"{' and '.join(_NAMES)} are not set"] if not any(process.environ.get(n) for n in _NAMES) else []
    yield write.finding(
        "wrong-interface",
        who,
        f"ranks may look for each other the wrong way: {(hanging or through)[0]}",
        evidence=[*hanging, *through, *unset],
        chain=(Link(subject=who, doing="looks for its peers"),),
        confidence="medium" if hanging else "low",
        severity=None if hanging else "warning",
    )

"""Evidence without any process that is known to be vLLM: a log, the limits of a pid, what is left in /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.base import known
from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.stages import socket_path_bytes, unix_path_limit

from . import write
from .capture_rules import capture_findings
from .gpu_loose import loose_gpu_findings
from .host_rules import loose_memory_findings, overloaded
from .log_rules import loose_log_findings
from .logs import pid_words
from .ray_rules import ray_findings
from .shm_rules import leak_line, leak_words, leaked, outgrown, outgrown_words, removed_findings
from .traffic_rules import traffic_findings
from .wrong_way import wrong_way_findings


def loose_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """What such evidence decides by itself. A cause that two pieces tell of comes once, of the one that tells more."""
    target = next((p.pid for p in snapshot.processes if p.pid > 0), None)
    found: dict[str, Finding] = {}
    for finding in (
        *loose_memory_findings(snapshot),
        *ray_findings(snapshot, None),
        *capture_findings(snapshot),
        *loose_gpu_findings(snapshot),
        *loose_log_findings(snapshot),
        *wrong_way_findings(snapshot),
        *_limits(snapshot),
        *_host(snapshot),
        *_room(snapshot),
        *_leaks(snapshot),
        *removed_findings(snapshot),
        *traffic_findings(snapshot, well=False, target=target),
    ):
        found.setdefault(finding.cause, finding)
    yield from found.values()


def _about(process: Process) -> Subject:
    pid = process.pid if process.pid > 0 else None
    return Subject(role="Other", pid=pid, label=process.comm or pid_words(process.pid))


def _limits(snapshot: Snapshot) -> Iterator[Finding]:
    for process in snapshot.processes:
        who = _about(process)
        chain = (Link(subject=who, doing="has reached a limit"),)
        group, limits = known(process.cgroup), known(process.limits)
        if group is not None and group.pids_max is not None and (group.pids_current or 0) >= group.pids_max:
            words = f"the control group of {pid_words(process.pid)} has {group.pids_current} of {group.pids_max} tasks"
            yield write.finding(
                "pids-limit",
                who,
                f"{words}: no new thread or process can be made",
                evidence=[f"pids.current {group.pids_current}, pids.max {group.pids_max}"],
                chain=chain,
            )
        if limits is not None and limits.nofile is not None and (process.n_fds or 0) >= limits.nofile:
            yield write.finding(
                "fd-exhausted",
                who,
                f"{pid_words(process.pid)} has {process.n_fds} of {limits.nofile} descriptors open",
                evidence=[f"{process.n_fds} descriptors, soft limit {limits.nofile}"],
                chain=chain,
            )
        base = process.environ.get("VLLM_RPC_BASE_PATH", "")
        if socket_path_bytes(base) > unix_path_limit():
            yield write.finding(
                "ipc-path-too-long",
                who,
                f"socket paths below VLLM_RPC_BASE_PATH would have {socket_path_bytes(base)} bytes;"
                f" a unix socket takes {unix_path_limit()}",
                evidence=[f"VLLM_RPC_BASE_PATH={base} ({len(base.encode())} bytes)"],
                chain=chain,
                confidence="medium",
            )


def _host(snapshot: Snapshot) -> Iterator[Finding]:
    words = overloaded(snapshot)
    if len(words) > 1:
        host = Subject(role="Host", label=snapshot.node.hostname or "the host")
        yield write.finding(
            "host-overloaded",
            host,
            f"the host is overloaded: {'; '.join(words)}",
            evidence=words,
            chain=(Link(subject=host, doing="gives no processor"),),
            confidence="medium",
        )


def _room(snapshot: Snapshot) -> Iterator[Finding]:
    found = outgrown(snapshot)
    if found is not None:
        mount, rings = found
        who = Subject(role="Other", pid=mount.pids[0] if mount.pids else None, label="/dev/shm")
        yield write.finding(
            "shm-too-small",
            who,
            outgrown_words(mount, rings),
            evidence=[f"{s.name}: {s.size} B" for s in rings[:8]],
            chain=(Link(subject=who, doing="has no room for the rings"),),
        )


def _leaks(snapshot: Snapshot) -> Iterator[Finding]:
    leaks = leaked(snapshot)
    if leaks:
        host = Subject(role="Host", label="/dev/shm")
        yield write.finding(
            "shm-full-of-leaks",
            host,
            f"no vLLM is running; {leak_words(leaks)}",
            evidence=[leak_line(s) for s in leaks[:10]],
            chain=(Link(subject=host, doing="holds what dead servers left"),),
            severity="warning",
        )

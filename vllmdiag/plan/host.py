"""The limits of this machine, for a plan that is to be held against them."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from vllmdiag.model.base import known
from vllmdiag.model.snapshot import Snapshot

_RAISED_TO = 65535
"""vLLM raises its soft limit of descriptors to this where the hard one allows."""

Limits = dict[str, tuple[int | None, str]]


def limits_here() -> Limits:
    """Name -> (value, None for unlimited; where it was read). What cannot be read is left out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: Limits = {"nofile": (effective_nofile(soft, hard), "RLIMIT_NOFILE of this shell, as vLLM will raise it")}
    with suppress(OSError):
        room = os.statvfs("/dev/shm")
        found["shm"] = (room.f_blocks * room.f_frsize, "statvfs of /dev/shm here")
    with suppress(OSError, ValueError):
        found["pids"] = (int(Path("/proc/sys/kernel/pid_max").read_text()), "/proc/sys/kernel/pid_max")
    with suppress(OSError, ValueError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        found["ports"] = (last - first + 1, "/proc/sys/net/ipv4/ip_local_port_range")
    return found


def limits_of(snapshot: Snapshot) -> Limits:
    """The limits that a live instance runs under, as far as they were seen."""
    mine = [p for p in snapshot.processes if p.pid in snapshot.target_pids]
    found: Limits = {}
    files = [limits.nofile for p in mine if (limits := known(p.limits)) is not None and limits.nofile]
    if files:
        found["nofile"] = (min(files), "/proc/PID/limits of its processes")
    pids = [group.pids_max for p in mine if p.cgroup is not None and (group := known(p.cgroup)) and group.pids_max]
    if pids:
        found["pids"] = (min(pids), "pids.max of its control group")
    mounts = [m.size for m in snapshot.shm_mounts if set(m.pids) & set(snapshot.target_pids) or not m.pids]
    if mounts:
        found["shm"] = (min(mounts), "statvfs of its /dev/shm")
    return found


def effective_nofile(soft: int, hard: int) -> int | None:
    """The soft limit that a vLLM ends up with; None where unlimited (RLIM_INFINITY)."""
    if soft == resource.RLIM_INFINITY:
        return None
    return max(soft, _RAISED_TO if hard == resource.RLIM_INFINITY else min(_RAISED_TO, hard))

"""When an endpoint must not be probed: each gate stands for harm that was measured, or an answer that proves nothing.

* At its limit of descriptors libzmq aborts the process that accepts on an ipc endpoint (4.3.5, ipc_listener.cpp).
* libzmq up to 4.3.2 takes a mere connection for a peer and sends it messages, which are lost (4.3.3 was not measured).
* An owner that does not run accepts nothing: each probe would stay in the queue and take the place of a real peer.
* A connection to a listener that is no ZMQ socket (gloo, a store, NCCL) may break a rendezvous.

All is asked right before the connect, of the process itself, not of what was recorded some seconds ago.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process
from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.endpoints import FD_HEADROOM, is_ipc_path, kind_of_listener

from . import cgroups, proc, procfs
from .netns import near
from .sockets import SocketWatch

SAFE_LIBZMQ = (4, 3, 4)

_HALTED = {"T": "stopped", "t": "stopped by a tracer", "D": "in an uninterruptible wait", "Z": "dead", "X": "dead"}
_IO_THREAD = "ZMQbg/IO"
_LIBZMQ = re.compile(r"/libzmq[^/]*\.so\.5\.2\.(\d+)$")  # libtool's 5.2.N is release 4.3.N
_SOMAXCONN = "/proc/sys/net/core/somaxconn"  # of the network namespace of the thread that reads it
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+|unlimited)\s", re.MULTILINE)


class Refusal(NamedTuple):
    """Why a probe is not made, and what would make it possible or say as much."""

    reason: str
    next: str


def candidates(sockets: Iterable[Socket], members: Iterable[int]) -> list[Socket]:
    """Listeners of `members` that are ZMQ sockets: unix paths of vLLM's form, and TCP listeners with ZMQ's backlog."""
    mine = set(members)
    return [s for s in sockets if s.state == "LISTEN" and mine & set(s.pids) and _is_zmq(s)]


def _is_zmq(listener: Socket) -> bool:
    if listener.family == "unix":
        return listener.local.startswith("/") and is_ipc_path(listener.local)
    kind = kind_of_listener(listener.send_q or 0)
    return kind is not None and kind.kind == "zmq"


def refusal(listener: Socket, owners: Sequence[Process], root: str = "/") -> Refusal | None:
    """Why the listener must not be connected to now; None where it may.

    Args:
        listener: one of `candidates`.
        owners: every process that has it open, as observed: all of them must pass, because any of them may accept.
        root: where the trees ``proc`` and ``sys`` of the owners are.
    """
    if not owners:
        return Refusal("who owns it cannot be seen", "run it with sudo")
    for owner in owners:
        if found := _owner_refusal(owner, root):
            return found
    if listener.family != "unix" and (found := _backlog_refusal(listener, owners[0].pid)):
        return found
    return queue_refusal(listener, [owner.pid for owner in owners])


def _owner_refusal(owner: Process, root: str) -> Refusal | None:
    try:
        return (
            _state_refusal(owner, root) or _libzmq_refusal(owner.pid, owner.libraries) or _room_refusal(owner.pid, root)
        )
    except OSError as error:
        hole = procfs.missing(f"pid {owner.pid}", error)
        return Refusal(f"pid {owner.pid} cannot be looked at: {hole.why}", hole.next)


def _state_refusal(owner: Process, root: str) -> Refusal | None:
    pid = owner.pid
    stat = proc.parse_stat(procfs.read(procfs.proc(root, pid, "stat")))
    if stat is None or stat.starttime != owner.starttime:
        return Refusal(f"pid {pid} has ended", "look again")
    if stat.state in _HALTED:
        return Refusal(f"pid {pid} is {_HALTED[stat.state]} ({stat.state}): it would not accept", "vllmdiag diagnose")
    threads = proc.sample_threads(pid, 0.0, root).values()
    halted = next((s.state for name, s in threads if name.startswith(_IO_THREAD) and s.state in _HALTED), None)
    if halted is not None:
        return Refusal(f"a ZMQ IO thread of pid {pid} is {_HALTED[halted]} ({halted})", "vllmdiag diagnose")
    group = cgroups.cgroup_of(pid, root)
    if not isinstance(group, Missing) and group.frozen:
        return Refusal(f"the control group of pid {pid} is frozen: it would not accept", "vllmdiag diagnose")
    return None


def _libzmq_refusal(pid: int, libraries: Iterable[str]) -> Refusal | None:
    versions = [libzmq_version(path) for path in libraries if os.path.basename(path).startswith("libzmq")]
    if not versions or None in versions:
        return Refusal(f"which libzmq pid {pid} runs is not known, and some lose messages to a probe", _INVENTORY)
    oldest = min(version for version in versions if version)
    if oldest < SAFE_LIBZMQ:
        return Refusal(f"libzmq {'.'.join(map(str, oldest))} of pid {pid} would lose messages to a probe", _INVENTORY)
    return None


_INVENTORY = "vllmdiag endpoints, without --probe-zmq: who binds and who connects tells the type as a rule"


def libzmq_version(path: str) -> tuple[int, int, int] | None:
    """The release of libzmq by the name of its file, such as ``libzmq-2f02442c.so.5.2.5``; None where it says none."""
    found = _LIBZMQ.search(path)
    return (4, 3, int(found[1])) if found else None


def _room_refusal(pid: int, root: str) -> Refusal | None:
    used = len(os.listdir(procfs.proc(root, pid, "fd")))
    limit = _OPEN_FILES.search(procfs.text(procfs.proc(root, pid, "limits")))
    if limit is None:
        return Refusal(f"the limit of open files of pid {pid} is not known", "")
    if limit[1].isdigit() and used + FD_HEADROOM > int(limit[1]):
        reason = f"the descriptor table of pid {pid} is nearly full ({used} of {limit[1]}): accepting could end it"
        return Refusal(reason, f"ls -l /proc/{pid}/fd")
    return None


def _backlog_refusal(listener: Socket, pid: int) -> Refusal | None:
    """Where the kernel cuts every backlog down to ZMQ's, the backlog does not tell a ZMQ socket from a rendezvous."""
    try:
        largest = int(near(pid, lambda: procfs.text(_SOMAXCONN)))
    except (OSError, ValueError):
        return Refusal(
            "whether it is a ZMQ socket cannot be told: net.core.somaxconn is not readable", "run it as root"
        )
    if (listener.send_q or 0) >= largest:
        return Refusal(f"it may be no ZMQ socket: net.core.somaxconn gives every listener {largest}", _INVENTORY)
    return None


def queue_refusal(listener: Socket, pids: Iterable[int]) -> Refusal | None:
    """Whether it still listens and nobody waits to be accepted, by a new look at the kernel's table."""
    with closing(SocketWatch(pids)) as watch:
        watch.sample(0.0)
        sockets, _ = watch.result()
    now = next((s for s in sockets if (s.inode, s.state) == (listener.inode, "LISTEN")), None)
    if now is None:
        return Refusal("it does not listen any more", "look again")
    if now.recv_q is None:
        return Refusal("how many connections wait to be accepted cannot be seen", "run it with sudo")
    if now.recv_q:
        waiting = f"{now.recv_q} connection{'s' if now.recv_q > 1 else ''}"
        return Refusal(f"{waiting} wait{'' if now.recv_q > 1 else 's'} to be accepted already", "vllmdiag diagnose")
    return None

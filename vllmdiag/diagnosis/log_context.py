"""What limits, control groups, mounts, the environment and sockets say to an error of the log."""

from __future__ import annotations

import re

from vllmdiag.model.base import known
from vllmdiag.model.logs import LogEvent
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.stages import socket_path_bytes, unix_path_limit

from .logs import pid_words
from .shm_rules import leaked
from .wrong_way import astray, proxied

_SMALL = 1 << 30
"""A mount below this has not been sized for vLLM: 64 MiB is what containers get by default."""
_SPEC_NODE = re.compile(r"node:(?P<node>[0-9a-fA-F][\w.:]*[\w])")
_SPEC_GPUS = re.compile(r"'GPU': (?P<n>[\d.]+)")
_PORT = re.compile(r"(?:port:? |:)(?P<port>\d{2,5})\b")
"""The port in the words of torch (``port: 43911``) and of ZMQ (``addr='tcp://192.0.2.10:14579'``)."""
_CRASH = re.compile(r"\b(?:VLLM::\S*|python\S*|pt_main_thread)\[\d+\]:? (?:segfault|trap|general protection)")
_LOOPBACK = re.compile(r"\[?(?:127\.|::1|::ffff:127\.)")


def context_of(slug: str, snapshot: Snapshot, event: LogEvent) -> list[str]:
    """Evidence beside the log for a cause, in words; empty where none was given."""
    if slug == "pids-limit":
        return _pids(snapshot)
    if slug == "fd-exhausted":
        return _descriptors(snapshot)
    if slug == "memlock-limit":
        return _memlock(snapshot)
    if slug == "cuda-fork-poisoned":
        return _environ(snapshot, "VLLM_WORKER_MULTIPROC_METHOD")
    if slug == "ipc-path-too-long":
        return _paths(snapshot)
    if slug == "wrong-interface":
        return _interfaces(snapshot)
    if slug == "ray-placement":
        return _ray(snapshot, event)
    if slug == "port-conflict":
        return _owners(snapshot, event)
    if slug == "oom-killed":
        return killed_for_memory(snapshot)
    if slug == "worker-dead":
        return _crashes(snapshot)
    if slug.startswith("shm-"):
        return _mounts(snapshot)
    return []


def _environ(snapshot: Snapshot, *names: str) -> list[str]:
    found = [(p.pid, name, p.environ[name]) for p in snapshot.processes for name in names if p.environ.get(name)]
    return [f"{name}={value} ({pid_words(pid)})" for pid, name, value in found][:3]


def _pids(snapshot: Snapshot) -> list[str]:
    groups = [(p.pid, g) for p in snapshot.processes if (g := known(p.cgroup)) is not None]
    full = [(pid, g) for pid, g in groups if g.pids_max is not None and (g.pids_current or 0) >= 0.95 * g.pids_max]
    words = [f"the control group of {pid_words(pid)} has {g.pids_current} of {g.pids_max} tasks" for pid, g in full[:1]]
    limits = [(p.pid, known(p.limits)) for p in snapshot.processes]
    words += [
        f"ulimit -u of {pid_words(pid)} is {'unlimited' if found.nproc is None else found.nproc}: not that limit"
        for pid, found in limits
        if full and found is not None
    ][:1]
    return words


def _descriptors(snapshot: Snapshot) -> list[str]:
    return [
        f"{pid_words(p.pid)} has {p.n_fds} of {found.nofile} descriptors open"
        for p in snapshot.processes
        if (found := known(p.limits)) is not None and found.nofile is not None and p.n_fds is not None
    ][:2]


def _memlock(snapshot: Snapshot) -> list[str]:
    return [
        f"{pid_words(p.pid)} may lock {found.memlock // 1024} KiB of memory"
        for p in snapshot.processes
        if (found := known(p.limits)) is not None and found.memlock is not None
    ][:2]


def _paths(snapshot: Snapshot) -> list[str]:
    words = []
    for name in ("VLLM_RPC_BASE_PATH", "TMPDIR"):
        base = next((p.environ[name] for p in snapshot.processes if p.environ.get(name)), None)
        if base is not None and socket_path_bytes(base) > unix_path_limit():
            words.append(f"{name} has {len(base.encode())} bytes; a socket below it {socket_path_bytes(base)}")
            break
    return words


def _interfaces(snapshot: Snapshot) -> list[str]:
    hanging = [s for s in snapshot.sockets if s.state == "SYN-SENT" and _LOOPBACK.match(s.remote)]
    words = [f"a connect to {s.remote} hangs: loopback never leads to another machine" for s in hanging[:2]]
    told = [p for p in snapshot.processes if p.environ]
    without = [p.pid for p in told if not p.environ.get("GLOO_SOCKET_IFNAME")]
    if without:
        others = next((p.pid for p in told if p.pid not in without), None)
        but = f", though it is for {pid_words(others)}" if others is not None else ""
        words.append(f"GLOO_SOCKET_IFNAME is not set for {pid_words(without[0])}{but}")
    words += [*astray(snapshot), *proxied(snapshot)]
    return [*words, *_environ(snapshot, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")]


def _owners(snapshot: Snapshot, event: LogEvent) -> list[str]:
    """Who listens on the port that the log names."""
    found = _PORT.search(event.text)
    if found is None:
        return []
    port = found["port"]
    holding = [s for s in snapshot.sockets if s.state == "LISTEN" and s.local.endswith(f":{port}")]
    names = {p.pid: p.comm for p in snapshot.processes if p.comm}
    owners = dict.fromkeys(pid for s in holding for pid in s.pids)
    return [f"port {port} is held by {' '.join((names.get(pid, ''), pid_words(pid))).strip()}" for pid in owners][:2]


def _crashes(snapshot: Snapshot) -> list[str]:
    """What the kernel says of a process of vLLM or Python that ended in native code."""
    return [f"kernel: {k.text}" for k in snapshot.kernel_lines if _CRASH.search(k.text)][:2]


def _ray(snapshot: Snapshot, event: LogEvent) -> list[str]:
    """What is asked for against what the cluster has."""
    pinned = _SPEC_NODE.search(event.text)
    gpus = sum(float(n) for n in _SPEC_GPUS.findall(event.text))
    asked = f"Ray has not placed {gpus:g} GPUs for {event.groups.get('seconds', '?')} s"
    host = next((p.environ["VLLM_HOST_IP"] for p in snapshot.processes if p.environ.get("VLLM_HOST_IP")), None)
    ray, words = snapshot.ray, []
    if ray is not None and pinned is not None and ray.nodes and pinned["node"] not in ray.nodes:
        words.append(f"{asked}: it asks for the node {pinned['node']}, and the nodes of Ray are {', '.join(ray.nodes)}")
    elif ray is not None and ray.gpus_total is not None and gpus > ray.gpus_total - (ray.gpus_used or 0):
        words.append(f"{asked}: of {ray.gpus_total:g} GPUs in the cluster {ray.gpus_used or 0:g} are taken")
    if pinned is not None and host == pinned["node"]:
        words.append(f"VLLM_HOST_IP={host} is the node that the request asks for")
    return words


def _mounts(snapshot: Snapshot) -> list[str]:
    words = [f"{m.path} has {_mib(m.size)}" + (f", {_mib(m.free)} free" if m.free else "") for m in snapshot.shm_mounts]
    if any("KUBERNETES_SERVICE_HOST" in p.environ for p in snapshot.processes):
        words.append(
            "it runs in Kubernetes: an emptyDir with medium Memory, mounted at /dev/shm of that pod, sets the size"
        )
    return words[:4]


def _mib(n: int) -> str:
    return f"{n / 2**20:.0f} MiB" if n < 2**30 else f"{n / 2**30:.1f} GiB"


def shm_cause(snapshot: Snapshot, event: LogEvent) -> str:
    """Why there is no room in /dev/shm: leftovers, a small mount, or one that is full; empty where that is not told."""
    sizes = [m.size for m in snapshot.shm_mounts]
    held_by_nobody = sum(s.resident or s.size for s in leaked(snapshot))
    if held_by_nobody and held_by_nobody > 0.5 * max(sizes, default=0):
        return "shm-full-of-leaks"
    if sizes and min(sizes) < _SMALL:
        return "shm-too-small"
    return "shm-exhausted" if sizes and (event.kind != "no_space" or "/dev/shm" in event.text) else ""


def killed_for_memory(snapshot: Snapshot) -> list[str]:
    """What says that the kernel has killed for memory."""
    groups = [(p.pid, g) for p in snapshot.processes if (g := known(p.cgroup)) is not None]
    words = [
        f"the control group of {pid_words(pid)} counts {g.oom_kill} kills for memory"
        + (f"; its limit is {_mib(g.memory_max)}" if g.memory_max is not None else "")
        for pid, g in groups
        if g.oom_kill
    ][:1]
    words += [f"kernel: {k.text}" for k in snapshot.kernel_lines if _OOM.search(k.text)][:2]
    logged = [e for d in snapshot.logs for e in (d.first_error, *d.other_errors) if e is not None]
    return words + [f"log: {e.text}" for e in logged if e.kind in ("oom_killed", "ray_oom")][:1]


_OOM = re.compile(r"out of memory|oom-kill|oom_reaper|invoked oom-killer", re.IGNORECASE)

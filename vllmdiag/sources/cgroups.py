"""The control group of a process, on cgroup v1, v2 and the hybrid of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Cgroup

from . import procfs

_UNLIMITED_V1 = 1 << 60
"""Version 1 writes "no limit" as the largest page-aligned number."""


class _Mount(NamedTuple):
    """A mounted hierarchy. `controllers` is empty for version 2."""

    controllers: frozenset[str]
    root: str
    place: str


class _Group(NamedTuple):
    """The directory of a group, and its ancestors up to where the mount begins: limits hold from each of them."""

    version: int
    path: str
    levels: tuple[str, ...]


def cgroup_of(pid: int, root: str = "/") -> Cgroup | Missing:
    """Limits in force for a process and how often they bit.

    Memory and pids are those of the ancestor with the least room left, throttling that of the most throttled one.
    """
    try:
        membership = _membership(procfs.text(procfs.proc(root, pid, "cgroup")))
    except OSError as error:
        return procfs.missing(f"control group of pid {pid}", error)
    groups = {name: _find(name, pid, membership, root) for name in ("memory", "pids", "cpu", "freezer", "")}
    main = groups["memory"] or groups[""]
    if main is None:
        return Missing(
            what=f"control group of pid {pid}",
            why="its hierarchy is not mounted where we can see it",
            next="run on the host, or mount /sys/fs/cgroup",
        )
    memory_max, memory_current, shmem, oom_kill = _memory(groups["memory"])
    pids_max, pids_current = _tightest(groups["pids"], "pids.max", "pids.current")
    nr_throttled, throttled_s = _throttled(groups["cpu"])
    return Cgroup(
        path=main.path,
        version=main.version,
        frozen=_frozen(groups["freezer"], groups[""]),
        memory_max=memory_max,
        memory_current=memory_current,
        shmem=shmem,
        oom_kill=oom_kill,
        pids_max=pids_max,
        pids_current=pids_current,
        nr_throttled=nr_throttled,
        throttled_s=throttled_s,
    )


def _membership(text: str) -> dict[str, str]:
    """Path by controller; the one of version 2 under ""."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _find(controller: str, pid: int, membership: dict[str, str], root: str) -> _Group | None:
    """The group that governs `controller`: that of version 1 where the controller is mounted there, else version 2.

    Seen through our own mounts first. A container next door is only to be seen through its own.
    """
    name = controller if controller in membership else ""
    if name not in membership or (name == "" and controller == "freezer"):
        return None
    path = membership[name]
    for who, base in (("self", root), (str(pid), procfs.proc(root, pid, "root"))):
        for mount in _mounts(who, root):
            below = _below(path, mount.root)
            if below is None or not (name in mount.controllers if name else not mount.controllers):
                continue
            top = os.path.join(base, mount.place.lstrip("/"))
            leaf = os.path.join(top, below) if below else top
            if os.path.isdir(leaf):
                return _Group(1 if name else 2, path, tuple(_up(leaf, top)))
    return None


def _below(path: str, mount_root: str) -> str | None:
    """`path` relative to what is mounted; None where it lies outside (``/../x``: outside our cgroup namespace)."""
    prefix = mount_root.rstrip("/") + "/"
    if not f"{path}/".startswith(prefix):
        return None
    below = path[len(prefix) :]
    return None if ".." in below.split("/") else below


def _mounts(who: str, root: str) -> Iterator[_Mount]:
    try:
        lines = procfs.text(procfs.proc(root, who, "mountinfo")).splitlines()
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind == "cgroup":
            yield _Mount(frozenset(options.split(",")), fields[3], fields[4])
        elif kind == "cgroup2":
            yield _Mount(frozenset(), fields[3], fields[4])


def _up(leaf: str, top: str) -> Iterator[str]:
    while True:
        yield leaf
        if leaf == top:
            return
        leaf = os.path.dirname(leaf)


def _memory(group: _Group | None) -> tuple[int | None, int | None, int | None, int | None]:
    """Limit, use, shmem (bytes) and count of OOM kills."""
    if group is None:
        return None, None, None, None
    leaf = group.levels[0]
    if group.version == 2:
        limit, used = _tightest(group, "memory.max", "memory.current")
        return limit, used, _value(leaf, "memory.stat", "shmem"), _value(leaf, "memory.events", "oom_kill")
    limit, used = _tightest(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return limit, used, _value(leaf, "memory.stat", "total_shmem"), _value(leaf, "memory.oom_control", "oom_kill")


def _tightest(group: _Group | None, limit: str, used: str) -> tuple[int | None, int | None]:
    """The limit with the least room left among the levels, and the use at that level; else the use of the leaf."""
    levels = () if group is None else group.levels
    pairs = [(_number(level, limit), _number(level, used)) for level in levels]
    limited = [(most, now) for most, now in pairs if most is not None and now is not None]
    return min(limited, key=lambda pair: pair[0] - pair[1]) if limited else (pairs[0] if pairs else (None, None))


def _throttled(group: _Group | None) -> tuple[int | None, float | None]:
    """How often and how long (seconds) the most throttled level had to wait for its quota."""
    worst: tuple[int | None, float | None] = None, None
    for level in () if group is None else group.levels:
        times = _value(level, "cpu.stat", "nr_throttled")
        if times is not None and times >= (worst[0] or 0):
            microseconds = _value(level, "cpu.stat", "throttled_usec")
            nanoseconds = _value(level, "cpu.stat", "throttled_time")
            waited = microseconds / 1e6 if microseconds is not None else (nanoseconds or 0) / 1e9
            worst = times, waited
    return worst


def _frozen(freezer: _Group | None, unified: _Group | None) -> bool:
    """Both files tell the state in force, a frozen ancestor included."""
    if freezer is not None and _text(freezer.levels[0], "freezer.state") in ("FROZEN", "FREEZING"):
        return True
    return unified is not None and _value(unified.levels[0], "cgroup.events", "frozen") == 1


def _text(directory: str, name: str) -> str:
    try:
        return procfs.text(os.path.join(directory, name)).strip()
    except OSError:  # not on this kernel, or not at the root of the hierarchy
        return ""


def _number(directory: str, name: str) -> int | None:
    word = _text(directory, name)
    return int(word) if word.isdigit() and int(word) < _UNLIMITED_V1 else None


def _value(directory: str, name: str, key: str) -> int | None:
    for line in _text(directory, name).splitlines():
        word, _, value = line.partition(" ")
        if word == key and value.isdigit():
            return int(value)
    return None

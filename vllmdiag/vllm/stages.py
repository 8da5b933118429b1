"""The stages of a start-up by role: how a stack shows each, in which order they come, whom one waits for in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import msgspec

from vllmdiag.model.process import Frame

from .signatures import depth_of, plays
from .tables import load
from .versions import in_range


class Stage(msgspec.Struct, frozen=True):
    """One stage."""

    id: str
    order: int
    """Stages of one role come in ascending order; those of different roles are not comparable."""
    name: str
    """What the process does in it, for people: ``loads weights``."""
    any: tuple[str, ...]
    """Patterns as in the table of signatures, one of which a frame must fit."""
    source: str
    roles: tuple[str, ...] = ()
    """Roles it is looked for in; empty means every one."""
    part: str = ""
    """What kind of work it is: ``import``, ``meet``, ``load``, ``queue``, ``compile``, ``run``, ``ready``."""
    waits_for: str = ""
    """Whom it depends on: ``engines``, ``workers``, ``ranks``, ``front``, ``coordinator``, ``storage``, ``ray`` ..."""
    since: str | None = None
    until: str | None = None


class Shim(msgspec.Struct, frozen=True):
    """A library that stands between vLLM and the driver."""

    library: str
    """Regular expression of its path."""
    name: str
    meaning: str
    next: str
    source: str


class _Tables(msgspec.Struct, frozen=True):
    stages: tuple[Stage, ...]
    shard: str
    weights: str
    lock_files: str
    caches: str
    cache_settings: tuple[str, ...]
    shims: tuple[Shim, ...]
    socket_name_bytes: int
    unix_path_limit: int
    network_filesystems: tuple[str, ...]
    start_methods: dict[str, str]


READY_ORDER = 90
"""Stages from this order on are not of the start-up any more."""


@cache
def _tables() -> _Tables:
    return load("stages", _Tables)


@cache
def stages() -> tuple[Stage, ...]:
    """Every stage, by role and order."""
    return _tables().stages


def stage_of(frames: Sequence[Frame], role: str, version: str | None = None) -> Stage | None:
    """The stage that a stack of the main thread shows: that of the innermost frame which is known to be one.

    An import within another stage does not count: modules are imported everywhere.

    Args:
        frames: innermost first.
        role: as `Member.role`; a role whose part is not known yet is tried with every stage.
        version: leaves out the stages that this version does not have.
    """
    found: list[tuple[bool, int, Stage]] = []
    for stage in stages():
        if not plays(role, stage.roles) or not in_range(version, stage.since, stage.until):
            continue
        depth = depth_of(frames, stage.any)
        if depth is not None:
            found.append((stage.part == "import", depth, stage))
    return min(found, key=lambda one: one[:2])[2] if found else None


def start_method(frames: Sequence[Frame]) -> str:
    """``fork``, ``spawn`` or ``forkserver``, by the frames a child begins with; empty where it was made otherwise.

    In a forked child they are followed by the stack that its parent had, which may tell of another method.
    """
    begin = next((i for i, f in enumerate(frames) if f.name.rsplit(".", 1)[-1] == "_bootstrap"), None)
    for frame in frames[begin:] if begin is not None else frames[-2:]:
        for method, pattern in _tables().start_methods.items():
            if re.search(pattern, f"{frame.name} ({frame.file})"):
                return method
    return ""


def shard_of(path: str) -> tuple[int, int] | None:
    """(number, count) of a weight file that is one of several: ``model-00002-of-00004.safetensors`` is (2, 4)."""
    found = re.search(_tables().shard, path)
    return (int(found["index"]), int(found["count"])) if found else None


def is_weights(path: str) -> bool:
    """The path is that of a file of weights, by its name."""
    return re.search(_tables().weights, path) is not None


def is_lock_file(path: str) -> bool:
    """The path is that of a lock of a cache: ``.../lock`` or ``.../<key>.lock``."""
    return re.search(_tables().lock_files, path) is not None


def is_cache(path: str) -> bool:
    """The path lies in a cache of a compiler or of downloads, by its usual names."""
    return re.search(_tables().caches, path) is not None


def cache_mark(path: str) -> str:
    """The part of a path by which `is_cache` knows it; empty where it does not."""
    found = re.search(_tables().caches, path)
    return found[0] if found else ""


def cache_settings() -> tuple[str, ...]:
    """Environment variables that say where caches lie, the most exact ones first."""
    return _tables().cache_settings


def shim_in(libraries: Sequence[str]) -> tuple[str, Shim] | None:
    """The first path that is a library between vLLM and the driver, with what is known of it."""
    for path in libraries:
        for shim in _tables().shims:
            if re.search(shim.library, path):
                return path, shim
    return None


def socket_path_bytes(base: str) -> int:
    """Length of the socket paths that vLLM makes below `base`: ``base/<uuid4>``."""
    return len(base.encode()) + _tables().socket_name_bytes


def unix_path_limit() -> int:
    """The longest path of a unix socket (sizeof sun_path without the NUL)."""
    return _tables().unix_path_limit


def is_network_filesystem(kind: str) -> bool:
    """The type of file system is one that is read over a network."""
    return kind in _tables().network_filesystems

"""The sockets between the processes of vLLM: who binds, who connects, and what bytes that wait there mean.

The paths are ``<VLLM_RPC_BASE_PATH or the temporary directory>/<uuid4>`` and carry no role, so an endpoint is told by
who listens and who connects. Two with the same pair of roles (overflow and notify of a ring) cannot be told apart.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

import msgspec

from .tables import load
from .versions import in_range

FD_HEADROOM = 64
"""Descriptors that a process which accepts connections of ZMQ must have to spare: at its limit libzmq aborts it."""

_IPC_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Endpoint(msgspec.Struct, frozen=True):
    """One kind of ZMQ endpoint."""

    name: str
    binds: str
    """Role that listens."""
    connects: str
    """Role that connects."""
    bind_type: str
    connect_type: str
    transport: tuple[Literal["ipc", "tcp"], ...]
    phase: Literal["start", "serving"]
    """``start``: it is closed when the start-up is over."""
    at_binder: str
    """What bytes in the receive queue on the side that listens are."""
    at_connector: str
    """What bytes in the receive queue on the side that connects are."""
    source: str
    since: str | None = None
    until: str | None = None

    @property
    def pattern(self) -> str:
        """``ROUTER/DEALER``, the side that listens first."""
        return f"{self.bind_type}/{self.connect_type}"


class Backlog(msgspec.Struct, frozen=True):
    """What the backlog of a TCP listener tells about it."""

    backlog: tuple[int, ...]
    kind: Literal["zmq", "http", "group"]
    meaning: str
    source: str


class _Tables(msgspec.Struct, frozen=True):
    endpoints: tuple[Endpoint, ...]
    backlogs: tuple[Backlog, ...]


@cache
def _tables() -> _Tables:
    return load("endpoints", _Tables)


@cache
def endpoints(version: str | None = None) -> tuple[Endpoint, ...]:
    """Every endpoint a version has."""
    return tuple(e for e in _tables().endpoints if in_range(version, e.since, e.until))


_ACTS_AS = {"Launcher": "APIServer", "RayWorker": "Worker", "Driver": "APIServer"}


@cache
def between(listener: str, connector: str, version: str | None = None) -> tuple[Endpoint, ...]:
    """Endpoints that a process of one role opens and one of another role connects to."""
    binds, connects = _ACTS_AS.get(listener, listener), _ACTS_AS.get(connector, connector)
    return tuple(e for e in endpoints(version) if (e.binds, e.connects) == (binds, connects))


def kind_of_listener(backlog: int) -> Backlog | None:
    """What a TCP listener is, by its backlog (Send-Q of `ss -tl`); None where that says nothing."""
    return next((b for b in _tables().backlogs if backlog in b.backlog), None)


def is_ipc_path(path: str) -> bool:
    """Whether a unix socket's path has the form that vLLM gives it: a directory and a version-4 UUID."""
    return _IPC_NAME.fullmatch(path.rpartition("/")[2]) is not None

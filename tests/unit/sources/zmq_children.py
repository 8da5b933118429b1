"""Processes that bind real ZMQ sockets, and what the inventory of sockets shows of them."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket
from vllmdiag.sources import observe, proc
from vllmdiag.sources.probe_gates import candidates
from vllmdiag.sources.sockets import SocketWatch

_PRELUDE = """
import json, os, socket, sys
import zmq

def say(value):
    print(json.dumps(value), flush=True)

def bind(kind, address, **options):
    bound = context.socket(getattr(zmq, kind))
    for name, value in options.items():
        bound.setsockopt(getattr(zmq, name), value)
    bound.bind(address)
    kept.append(bound)
    return bound

context = zmq.Context()
kept = []
"""


def command(code: str) -> tuple[str, ...]:
    """How to run `code` after the prelude."""
    return (sys.executable, "-c", _PRELUDE + code)


def start(children: Any, code: str, *args: str, under: Sequence[str] = ()) -> int:
    """Run `code` after the prelude and wait until it says something; returns its pid."""
    child = children.program(*under, *command(code), *args)
    assert children.line(child.pid), "it died before it was ready"
    pid: int = child.pid
    return pid


def ipc_path(directory: Path) -> str:
    """A path as vLLM makes them."""
    return str(directory / str(uuid.uuid4()))


def observed(*pids: int) -> list[Process]:
    """The processes as a look would record them."""
    return observe.observe_all([p for p in proc.scan() if p.pid in pids])


def sockets(*pids: int) -> tuple[Socket, ...]:
    """Their sockets now."""
    with closing(SocketWatch(pids)) as watch:
        watch.sample(0.0)
        return watch.result()[0]


def listeners(*pids: int) -> list[Socket]:
    """Their ZMQ listeners."""
    return candidates(sockets(*pids), pids)


def only_listener(pid: int) -> Socket:
    """The one ZMQ listener there is."""
    (listener,) = listeners(pid)
    return listener


def snapshot(*pids: int) -> Snapshot:
    """What a look at them would give."""
    return Snapshot(target_pids=pids, processes=tuple(observed(*pids)), sockets=sockets(*pids))


def n_fds(pid: int) -> int:
    """How many descriptors a process has open: an accepted connection is one."""
    return len(os.listdir(f"/proc/{pid}/fd"))

"""Nodes of a Ray cluster: a driver of Ray's own Python puts one task of no resources on each, and passes on what comes.

The driver is a program of its own because Ray lives in the environment of the cluster, not in that of vllmdiag.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import msgspec

from vllmdiag.fleet.ask import failure
from vllmdiag.fleet.command import Far
from vllmdiag.fleet.wire import Answer
from vllmdiag.model.errors import HelperMissingError, TargetError, VllmdiagError
from vllmdiag.model.fleet import NodeReport

_CONNECT_S = 60.0
"""For Ray to let the driver in and to list its nodes."""
_SLACK_S = 15.0
"""For Ray to start a process for a task."""


class _Said(msgspec.Struct):
    """One line of the driver: the list of nodes, or what became of one, or why there is no list."""

    nodes: tuple[str, ...] | None = None
    node: str = ""
    code: int | None = None
    """Of the command; None where it did not end."""
    stdout: str = ""
    """Base 64."""
    stderr: str = ""
    asked: float = 0.0
    """When, seconds since the epoch on the driver's clock; `heard` likewise."""
    heard: float = 0.0
    problem: str = ""


def ask_ray(
    address: str | None,
    far: Far,
    deadline_s: float,
    at_once: int,
    done: Callable[[NodeReport], None],
    python: Path | None = None,
) -> tuple[NodeReport, ...]:
    """Ask every live node of a cluster.

    Args:
        address: of the cluster; None: the one that this machine is part of.
        far: what is run on each node.
        deadline_s: for each node.
        at_once: most tasks at a time.
        done: called with each report as it comes.
        python: the interpreter that has Ray.

    Raises:
        HelperMissingError: it has no Ray.
        TargetError: no cluster answers.
    """
    source = (resources.files("vllmdiag.fleet.engines") / "ray_driver.py").read_text(encoding="utf-8")
    interpreter = str(python) if python is not None else "python3"
    job = msgspec.json.encode(
        {
            "address": address,
            "command": list(far.words),
            "stdin": base64.b64encode(far.stdin).decode(),
            "deadline_s": deadline_s,
            "at_once": at_once,
        }
    )
    with _driver([interpreter, "-c", source], job) as driver:
        return _listen(driver, deadline_s, at_once, interpreter, done)


@contextlib.contextmanager
def _driver(argv: list[str], job: bytes) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise HelperMissingError(
            f"cannot run {argv[0]}", why=str(error.strerror), next="--ray-python /path/of/the/cluster/bin/python"
        ) from None
    with child:
        try:
            assert child.stdin is not None  # noqa: S101  it was asked for above
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(job)
                child.stdin.close()
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _listen(
    driver: subprocess.Popen[bytes],
    deadline_s: float,
    at_once: int,
    interpreter: str,
    done: Callable[[NodeReport], None],
) -> tuple[NodeReport, ...]:
    """Take the driver's lines until it has spoken of every node, or for as long as that may take."""
    assert driver.stdout is not None  # noqa: S101
    nodes: tuple[str, ...] | None = None
    found: dict[str, NodeReport] = {}
    patience = threading.Timer(_CONNECT_S, _kill, [driver.pid])
    patience.start()
    try:
        for line in driver.stdout:
            said = _understood(line)
            if said is None:
                continue  # Ray prints what it likes
            if said.nodes is not None:
                nodes = said.nodes
                patience.cancel()
                rounds = -(-len(nodes) // at_once)
                patience = threading.Timer(rounds * (deadline_s + _SLACK_S), _kill, [driver.pid])
                patience.start()
            elif said.node:
                found[said.node] = _report(said, deadline_s)
                done(found[said.node])
            else:
                raise _no_cluster(said.problem, interpreter)
    finally:
        patience.cancel()
    if nodes is None:
        raise _no_cluster(f"no answer within {_CONNECT_S:g} s", interpreter)
    mute = f"no answer within {deadline_s:g} s"
    return tuple(found.get(n) or NodeReport(node=n, outcome="silent", problem=mute) for n in nodes)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _understood(line: bytes) -> _Said | None:
    if not line.startswith(b"{"):
        return None
    try:
        return msgspec.json.decode(line, type=_Said)
    except msgspec.DecodeError:
        return None


def _report(said: _Said, deadline_s: float) -> NodeReport:
    answer = Answer(said.node, said.asked)
    answer.feed(base64.b64decode(said.stdout), said.heard)
    took = said.heard - said.asked
    if said.code is None:
        return answer.report(took, said.problem or f"no answer within {deadline_s:g} s", "silent")
    # Nothing is heard before a task has ended: too late to compare clocks.
    report = answer.report(took, *((failure(said.code, said.stderr), "refused") if said.code else ()))
    return msgspec.structs.replace(report, skew_s=None, skew_within_s=None)


def _no_cluster(why: str, interpreter: str) -> VllmdiagError:
    if why == "no ray":
        return HelperMissingError(
            f"{interpreter} has no Ray",
            why="a driver in the Python of the cluster asks its nodes",
            next="--ray-python /path/of/the/cluster/bin/python",
        )
    return TargetError("no Ray cluster answers", why=why, next="--ray-address HOST:6379, or run it on a node of it")

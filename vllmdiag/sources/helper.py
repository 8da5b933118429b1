"""Helper programs, run so that they can neither outlive their deadline nor fill the memory."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

REAP_S = 0.5
"""Seconds a killed helper may take to die. One stuck in the kernel is left behind: `subprocess` reaps it later."""

POLL_S = 0.1


class Output(NamedTuple):
    """What a helper left."""

    code: int | None
    """Exit code; None when it was killed."""
    out: bytes
    err: bytes
    late: bool = False
    """Killed because the deadline passed."""
    too_much: bool = False
    """Killed because it wrote more than was allowed."""


def run(command: Sequence[str], deadline: float, max_bytes: int) -> Output:
    """Run a program without a shell and without input, and collect both its outputs.

    Args:
        command: program and arguments.
        deadline: on the clock of `time.monotonic`; after it the program gets SIGKILL.
        max_bytes: of stdout and stderr together.

    Raises:
        OSError: it cannot be started.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    texts = {"out": bytearray(), "err": bytearray()}
    try:
        with selectors.DefaultSelector() as ready:
            for name, pipe in (("out", child.stdout), ("err", child.stderr)):
                if pipe is not None:
                    ready.register(pipe, selectors.EVENT_READ, (name, pipe))
            too_much = _drain(child, ready, texts, deadline, max_bytes)
        code = None if too_much else child.wait(max(0.0, deadline - time.monotonic()))
        return Output(code, bytes(texts["out"]), bytes(texts["err"]), too_much=too_much)
    except (TimeoutError, subprocess.TimeoutExpired):
        return Output(None, bytes(texts["out"]), bytes(texts["err"]), late=True)
    finally:
        _end(child)


def _drain(
    child: subprocess.Popen[bytes],
    ready: selectors.BaseSelector,
    texts: dict[str, bytearray],
    deadline: float,
    max_bytes: int,
) -> bool:
    """Read until both pipes are closed. True when there was too much. Raises TimeoutError."""
    while ready.get_map():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        events = ready.select(min(left, POLL_S))
        if not events and child.poll() is not None:
            return False  # it has ended, but a process of its own, or a fork of ours, still holds the pipe
        for key, _ in events:
            name, pipe = key.data
            chunk = pipe.read1(1 << 16)
            texts[name] += chunk
            if not chunk:
                ready.unregister(pipe)
        if sum(map(len, texts.values())) > max_bytes:
            return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()  # does nothing to one that has been waited for
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(REAP_S)
    pipes: tuple[IO[bytes] | None, ...] = (child.stdout, child.stderr)
    for pipe in pipes:
        if pipe is not None:
            pipe.close()

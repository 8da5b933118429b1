"""Helper programs, run so that they can neither outlive their deadline nor fill the memory."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
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


def run(command: Sequence[str], deadline: float, max_bytes: int, stop: threading.Event | None = None) -> Output:
    """Run a program without a shell and without input, and collect both its outputs.

    Args:
        command: program and arguments.
        deadline: on the clock of `time.monotonic`; after it the program gets SIGKILL.
        max_bytes: of stdout and stderr together.
        stop: nobody wants the answer any more: the same as the deadline, within 0.1 s of being set.

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
            too_much = _drain(child, ready, texts, _left(deadline, stop), max_bytes)
        code = None if too_much else _wait(child, _left(deadline, stop))
        return Output(code, bytes(texts["out"]), bytes(texts["err"]), too_much=too_much)
    except TimeoutError:
        return Output(None, bytes(texts["out"]), bytes(texts["err"]), late=True)
    finally:
        _end(child)


def _left(deadline: float, stop: threading.Event | None) -> Callable[[], float]:
    """Seconds to wait before asking again, at most `POLL_S`; what it returns raises TimeoutError when it is over."""

    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0 or (stop is not None and stop.is_set()):
            raise TimeoutError
        return min(seconds, POLL_S)

    return left


def _drain(
    child: subprocess.Popen[bytes],
    ready: selectors.BaseSelector,
    texts: dict[str, bytearray],
    left: Callable[[], float],
    max_bytes: int,
) -> bool:
    """Read until both pipes are closed. True when there was too much. Raises TimeoutError."""
    while ready.get_map():
        events = ready.select(left())
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


def _wait(child: subprocess.Popen[bytes], left: Callable[[], float]) -> int:
    """The exit code of a child that has closed its outputs. Raises TimeoutError."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(left())


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()  # does nothing to one that has been waited for
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(REAP_S)
    pipes: tuple[IO[bytes] | None, ...] = (child.stdout, child.stderr)
    for pipe in pipes:
        if pipe is not None:
            pipe.close()

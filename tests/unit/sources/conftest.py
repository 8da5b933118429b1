"""Real processes for the tests of the sources: started, waited for, looked at as somebody else, and ended by pid."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
NOBODY = 65534
PR_SET_DUMPABLE = 4


class Children:
    """Starts child processes and ends every one of them after the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def program(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start any program."""
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.started.append(child)
        return child

    def python(self, code: str, *, under: Sequence[str] = (), **options: Any) -> tuple[int, str]:
        """Start a Python that runs `code` and wait for the one line it prints; returns its pid and that line.

        `under` is a command that execs the rest, such as ``unshare -n``.
        """
        child = self.program(*under, sys.executable, "-S", "-c", code, **options)  # -S: starts fast
        line = self.line(child.pid)
        assert line, "the child died before it was ready"
        return child.pid, line

    def line(self, pid: int) -> str:
        """The next line that a child prints."""
        stdout = self._child(pid).stdout
        assert stdout is not None
        return stdout.readline().strip()

    def tell(self, pid: int, text: str) -> None:
        """Send a line to the stdin of a child."""
        stdin = self._child(pid).stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def end(self, pid: int) -> None:
        """Kill one child and reap it."""
        child = self._child(pid)
        self.started.remove(child)
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def _child(self, pid: int) -> subprocess.Popen[str]:
        return next(child for child in self.started if child.pid == pid)


@pytest.fixture
def children() -> Iterator[Children]:
    """A starter of processes that leaves none behind."""
    children = Children()
    yield children
    for child in tuple(children.started):
        children.end(child.pid)


@pytest.fixture
def eventually() -> Callable[[Callable[[], T]], T]:
    """Call a function until it returns something true, for at most 20 s."""

    def wait(condition: Callable[[], T]) -> T:
        deadline = time.monotonic() + 20
        while not (result := condition()):
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.005)
        return result

    return wait


@pytest.fixture
def as_nobody() -> Callable[..., Any]:
    """Call a function in a fork that has no privilege at all, and return what it returned (as root only).

    A second function is called before, with every privilege.
    """

    def drop_and_call(function: Callable[[], T], before: Callable[[], object] = lambda: None) -> T:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                before()
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                # A change of uid hides the process from itself, as if it had been executed set-uid.
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(function(), pipe)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        assert data, "it failed in the fork"
        result: T = pickle.loads(data)
        return result

    return drop_and_call

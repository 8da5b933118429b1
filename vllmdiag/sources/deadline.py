"""Calls that may never return, made in a forked child that can be killed.

A read of /proc/PID/cmdline, environ, maps or smaps waits for the target's mmap_lock, and a target stuck in the kernel
may hold that for ever; a directory on a dead NFS server never answers. A thread stuck so cannot be abandoned, a child
can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_HEADER = struct.Struct("<iI")  # errno (0 = answered), bytes that follow
_STARVED_WAITS = 10
_REAP_S = 0.1  # a killed child in D dies when the kernel lets it; init reaps it after us


def each(
    function: Callable[[T], bytes],
    items: Sequence[T],
    *,
    timeout_s: float = 0.5,
    total_s: float = 2.0,
    group: Callable[[T], object] | None = None,
) -> list[bytes | OSError]:
    """`function` of every item, in order; nothing is raised.

    Args:
        function: runs in the child; returns bytes or raises OSError. It must not need threads or locks of the parent.
        items: one call each, all in one child as long as none is late.
        timeout_s: seconds one call may sleep; then its child is killed and a new one goes on with the next item. A
            child that is runnable is not stuck but short of CPU, and is given ten times as long.
        total_s: seconds that late calls may take together; what is left after that is not tried.
        group: what an item belongs to, such as its process: where one call is late, the others of its group are not
            tried.

    Returns:
        For every item the bytes or the error: TimeoutError where the call was late or not tried, ChildProcessError
        where the child died.
    """
    results: dict[int, bytes | OSError] = {}
    todo = list(range(len(items)))
    wasted_s = 0.0
    while todo and wasted_s < total_s:
        answers, error = _one_child(function, [items[i] for i in todo], timeout_s)
        results.update(zip(todo, answers, strict=False))
        todo = todo[len(answers) :]
        if error is not None:
            wasted_s += timeout_s
            stuck = todo[:1] if group is None else [i for i in todo if group(items[i]) == group(items[todo[0]])]
            results.update(dict.fromkeys(stuck, error))
            todo = [i for i in todo if i not in stuck]
    not_tried = TimeoutError(errno.ETIMEDOUT, "not tried: earlier reads did not return")
    return [results.get(i, not_tried) for i in range(len(items))]


def call(function: Callable[[], bytes], *, timeout_s: float = 0.5) -> bytes:
    """One call.

    Raises:
        OSError: what the function raised; TimeoutError when it was late, ChildProcessError when the child died.
    """
    (result,) = each(lambda _: function(), (None,), timeout_s=timeout_s)
    if isinstance(result, OSError):
        raise result
    return result


def _one_child(
    function: Callable[[T], bytes], items: Sequence[T], timeout_s: float
) -> tuple[list[bytes | OSError], OSError | None]:
    """Answers of one child up to its end or its first late call, and the error for the item it stood at, if any."""
    reader, writer = os.pipe()
    pid = _fork()
    if pid == 0:
        os.close(reader)  # else its own end would keep it writing for ever to a parent that has gone
        _serve(function, items, writer)
    os.close(writer)
    answers: list[bytes | OSError] = []
    error: OSError | None = None
    try:
        while len(answers) < len(items):
            code, size = _HEADER.unpack(_receive(reader, _HEADER.size, pid, timeout_s))
            data = _receive(reader, size, pid, timeout_s)
            answers.append(data if code == 0 else OSError(code, data.decode("utf-8", "replace")))
    except (TimeoutError, ChildProcessError) as late:
        error = late
    finally:
        os.close(reader)
        _end(pid)
    return answers, error


def _fork() -> int:
    with warnings.catch_warnings():
        # Python >= 3.12 warns about fork in a process with threads: the child only reads files and writes to its pipe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(function: Callable[[T], bytes], items: Sequence[T], writer: int) -> None:
    """The child: never returns, and never runs anything of the parent's (handlers, buffers, atexit)."""
    try:
        for item in items:
            try:
                code, data = 0, function(item)
            except OSError as error:
                code, data = error.errno or errno.EIO, (error.strerror or "").encode()
            frame = _HEADER.pack(code, len(data)) + data
            while frame:
                frame = frame[os.write(writer, frame) :]
    finally:
        os._exit(0)


def _receive(reader: int, size: int, pid: int, timeout_s: float) -> bytes:
    data = b""
    waits = 0
    while len(data) < size:
        ready, _, _ = select.select([reader], [], [], timeout_s)
        if not ready:
            waits += 1
            if waits >= _STARVED_WAITS or not _runnable(pid):
                raise TimeoutError(errno.ETIMEDOUT, "the read did not return")
            continue
        chunk = os.read(reader, min(size - len(data), 1 << 20))
        if not chunk:
            raise ChildProcessError(errno.ECHILD, "the reading child died")
        data += chunk
    return data


def _runnable(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"R"
    except OSError:
        return False


def _end(pid: int) -> None:
    # Where SIGCHLD is ignored (a choice that programs inherit) the kernel reaps it itself.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.0005)

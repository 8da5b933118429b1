"""Network namespaces: which one a process lives in, and how to borrow one without leaving our own.

`setns` moves only the calling thread, so it is done in a thread that ends at once: no other code of ours ever runs in a
foreign namespace, and a socket made there stays there. `os.setns` exists only from Python 3.12, hence ctypes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000


def netns_of(pid: int) -> int:
    """Inode of the network namespace of `pid`; 0 where it may not be named (another uid) or the process is gone."""
    return _inode(f"/proc/{pid}/ns/net")


def netns_key(pid: int) -> int:
    """A number that is equal for two processes, of whatever uid, if and only if they share a network namespace.

    Where ``ns/net`` may not be read, this still tells: procfs numbers ``/proc/PID/net/unix`` once for each namespace
    and lets everybody stat it. It means nothing outside this boot. 0 for a process that is gone.
    """
    return _inode(f"/proc/{pid}/net/unix")


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def near(pid: int, function: Callable[[], T]) -> T:
    """Call `function` on the network of `pid`: right here where we share it. Raises what `call_in_netns_of` raises."""
    return function() if netns_key(pid) == netns_key(os.getpid()) else call_in_netns_of(pid, function)


def call_in_netns_of(pid: int, function: Callable[[], T]) -> T:
    """Call `function` inside the network namespace of `pid` and return what it returns.

    Raises:
        OSError: the process is gone, or setns is not permitted (needs CAP_SYS_ADMIN); and whatever `function` raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def visit() -> None:
        try:
            _enter(pid)
            results.append(function())
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread below
            errors.append(error)

    thread = threading.Thread(target=visit, name="vllmdiag-netns", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"/proc/{pid}/ns/net")
    finally:
        os.close(fd)

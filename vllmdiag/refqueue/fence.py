"""The memory fence: what one process stored before it is seen by the others before anything stored after it.

The ring has no locks, only flag bytes, so the order in which stores become visible is all that protects it. Two places
need care. A slot's data must be visible before its written flag (x86 keeps the order of stores, ARM does not). And a
process that stores its own flag and then looks at another's must not look too early: a store may wait in the buffer
of its core while a later load runs ahead, on x86 too.

vLLM takes and releases a lock: the locked instruction in it is a full barrier on x86 (some 0.25 us). On ARM acquire
and release are one-way barriers each, so there the C11 fence of libatomic is used where it can be loaded.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

_SEQ_CST = 5  # memory_order_seq_cst of C11

_lock = threading.Lock()


def _by_lock() -> None:
    with _lock:
        pass


def _by_libatomic() -> Callable[[], None] | None:
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes, fence.restype = [ctypes.c_int], None
    return lambda: fence(_SEQ_CST)


def choose(machine: str) -> Callable[[], None]:
    """The fence for a `platform.machine`: the lock on x86, elsewhere the C11 fence where there is one."""
    strong_order = machine in {"x86_64", "AMD64", "i686"}
    return _by_lock if strong_order else _by_libatomic() or _by_lock


memory_fence = choose(platform.machine())

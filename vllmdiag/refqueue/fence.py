"""Memory fences: in which order others see what one process stores.

The ring has no locks, only flag bytes, so this order is all that protects it. Two kinds are needed:

`order_fence` keeps the loads and stores before it before the stores and loads after it, but for one case: a load may
overtake an earlier store. x86 does that much by itself; ARM does not.

`full_fence` keeps that case too. A process that sets its own flag and then looks at another's needs it: on x86 too a
store waits in its core for a while, and the look would run ahead of it.

vLLM has one fence, the full one: it takes and releases a lock. The locked instruction in there is a full barrier on
x86 (some 0.3 us). On ARM acquire and release are barriers of one direction each, so there both kinds are the C11 fence
of libatomic where it can be loaded.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

Fence = Callable[[], None]

_SEQ_CST = 5  # memory_order_seq_cst of C11

_lock = threading.Lock()


def by_lock() -> None:
    """Take and release a lock."""
    with _lock:
        pass


def by_libatomic() -> Fence | None:
    """The C11 fence; None where libatomic is not installed."""
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes, fence.restype = [ctypes.c_int], None
    return lambda: fence(_SEQ_CST)


def choose(machine: str) -> tuple[Fence, Fence]:
    """(order_fence, full_fence) for a machine as `platform.machine` names it."""
    if machine in {"x86_64", "AMD64", "i686"}:
        return (lambda: None), by_lock
    fence = by_libatomic() or by_lock
    return fence, fence


order_fence, full_fence = choose(platform.machine())

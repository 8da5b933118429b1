"""vLLM's MessageQueue without torch: the same memory, the same sockets, the same order of writes.

It carries the miniature vLLM of `vllmdiag.lab`, and it is where to learn how the real one works. Read in this order:
ring.py (the flags), segment.py (the memory), fence.py (what is seen when), framing.py (what is in a slot), wakeup.py
(how a reader sleeps), writer.py, reader.py, queue.py (the whole). A queue of vLLM can stand at either end.
"""

from __future__ import annotations

from .dialect import NEWEST, Dialect
from .handle import Handle
from .queue import MessageQueue

__all__ = ["NEWEST", "Dialect", "Handle", "MessageQueue"]

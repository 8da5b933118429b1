"""Memory of this process as the kernel counts it, and a forked child that answers through a pipe."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")

_PRESENT = 1 << 63
_FRAME = (1 << 55) - 1


def frame(address: int) -> int | None:
    """Number of the physical page behind an address, from /proc/self/pagemap.

    Returns:
        None where this process has not touched the page yet, 0 where the kernel does not tell (it takes CAP_SYS_ADMIN).
    """
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        (entry,) = struct.unpack("<Q", pagemap.read(8))
    return entry & _FRAME if entry & _PRESENT else None


def rollup() -> dict[str, int]:
    """Sums over all mappings of this process, bytes: ``Private_Dirty``, ``Shared_Clean``, ``Rss`` ..."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        found[name.rstrip(":")] = int(value) * 1024
    return found


def private() -> int:
    """Bytes that only this process has."""
    sums = rollup()
    return sums["Private_Clean"] + sums["Private_Dirty"]


def in_child(work: Callable[[], Any]) -> Any:
    """Fork, let the child do the work, and return its result. Raises RuntimeError where the child failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            os.write(writing, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    if not data:
        raise RuntimeError("the child has failed; what it wrote is above")
    return pickle.loads(data)


def mib(n: float) -> str:
    """Bytes as MiB."""
    return f"{n / 2**20:.1f} MiB"

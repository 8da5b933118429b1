"""Copy on write: what a forked child costs, and what makes it cost more."""

from __future__ import annotations

import mmap

from .memory import PAGE, in_child, mib, private
from .report import Report

_BYTES = 64 << 20
_OBJECTS = 1_000_000


def measure() -> Report:
    """See the package."""
    block = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, _BYTES, PAGE):
        block[at] = 1
    objects = [str(i) for i in range(_OBJECTS)]

    def child() -> list[tuple[str, int]]:
        seen = [("right after the fork", private())]
        for at in range(0, _BYTES, PAGE):
            block[at]
        seen.append((f"after reading {mib(_BYTES)} of bytes", private()))
        for at in range(0, _BYTES // 4, PAGE):
            block[at] = 2
        seen.append((f"after writing one byte into each page of {mib(_BYTES / 4)}", private()))
        for _ in objects:
            pass
        seen.append((f"after a look at {_OBJECTS} Python objects, changing none", private()))
        return seen

    rows = [("memory of the parent that only it has, before", mib(private()))]
    rows += [(f"the child's own pages {when}", mib(value)) for when, value in in_child(child)]
    return Report(
        look_at="Private_Clean + Private_Dirty in /proc/PID/smaps_rollup of the child",
        rows=tuple(rows),
        learned="RSS counts shared pages in full for everybody; what a process really costs is its PSS. A reference"
        " count is a write: forked workers slowly unshare the objects of their parent.",
    )

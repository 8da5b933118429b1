"""Two processes, one address: private memory is two pages from the first write on, shared memory stays one."""

from __future__ import annotations

import ctypes
import mmap

from .memory import PAGE, frame, in_child
from .report import Report


def measure() -> Report:
    """See the package."""
    private = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    for memory in (private, shared):
        memory[:6] = b"parent"

    def child() -> tuple[list[int | None], list[int | None]]:
        before = [frame(_address(private)), frame(_address(shared))]
        for memory in (private, shared):
            memory[:6] = b"child "
        return before, [frame(_address(private)), frame(_address(shared))]

    before, after = in_child(child)
    mine = [frame(_address(private)), frame(_address(shared))]
    rows = []
    for i, (name, memory) in enumerate((("private", private), ("shared", shared))):
        rows += [
            (f"{name}: address in both processes", f"{_address(memory):#x}"),
            (f"{name}: physical page of the child before it writes", _page(before[i], mine[i])),
            (f"{name}: physical page of the child after it has written", _page(after[i], mine[i])),
            (f"{name}: what the parent reads then", bytes(memory[:6]).decode()),
        ]
    return Report(
        look_at="/proc/PID/pagemap of the same address in parent and child (the page numbers need root)",
        rows=tuple(rows),
        learned="An address says nothing across processes. Ranks share only what is in /dev/shm: the rings.",
    )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _page(theirs: int | None, mine: int | None) -> str:
    if theirs is None or mine is None:
        return "not mapped by it yet"
    if not theirs or not mine:
        return "not told without root"
    return f"{theirs:#x}, {'the same as' if theirs == mine else 'another than'} the parent's ({mine:#x})"

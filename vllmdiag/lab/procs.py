"""Processes, read plainly from /proc: the lab must know its own without asking the program that it tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SHM = "/dev/shm/"
_TAIL = 128


class Proc(NamedTuple):
    """One process."""

    pid: int
    ppid: int
    pgid: int
    state: str
    title: str
    """Its title, where it has set one (``VLLM::Worker_TP1``)."""
    started_s: float
    """When it was started, seconds after boot."""


def scan() -> Iterator[Proc]:
    """Every process."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := read(int(name))):
            yield found


def read(pid: int) -> Proc | None:
    """One process; None when it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        title = words[0].decode(errors="replace")
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return Proc(pid, int(fields[1]), int(fields[2]), fields[0], title if "::" in title else "", started)
    return None


def _rings(pid: int) -> Iterator[tuple[str, str]]:
    """(path of the descriptor, name) of every segment that a process has open, removed ones too."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{fd}"
            with suppress(OSError):
                path = os.readlink(link)
                if path.startswith(_SHM + "psm_"):
                    yield link, path.removeprefix(_SHM)


def segments(pid: int) -> set[str]:
    """Names of the segments in the machine's own /dev/shm that a process has open."""
    found = set()
    for link, name in _rings(pid):
        with suppress(OSError):
            if os.path.samefile(link, _SHM + name):
                found.add(name)
    return found


def tails(pid: int) -> Iterator[tuple[str, bytes]]:
    """(name, last bytes) of every segment that a process has open: the flags of a ring stand there."""
    for link, name in _rings(pid):
        with suppress(OSError):
            fd = os.open(link, os.O_RDONLY)
            try:
                yield name, os.pread(fd, _TAIL, max(0, os.fstat(fd).st_size - _TAIL))
            finally:
                os.close(fd)

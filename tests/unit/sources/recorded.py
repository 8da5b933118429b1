"""A recorded /proc: a directory that the sources read with ``root=``."""

from __future__ import annotations

import os
from pathlib import Path

STAT = "{pid} ({comm}) {state} {ppid} {pgid} {sid} 0 -1 4194304 1 2 3 4 250 50 0 0 20 0 7 0 {starttime} 1000 256 0\n"
STATUS = (
    "Name:\tx\nTracerPid:\t0\nUid:\t1000\t1001\t1000\t1000\nNSpid:\t{pid}\t7\nSigPnd:\t{sigpnd}\nShdPnd:\t{shdpnd}\n"
)


def record(
    root: Path,
    pid: int,
    *,
    comm: str = "python3",
    state: str = "S",
    ppid: int = 1,
    starttime: int = 4200,
    cmdline: bytes = b"python3\0-c\0x\0",
    sigpnd: str = "0000000000000000",
    shdpnd: str = "0000000000000000",
) -> Path:
    """Write one process below `root`/proc and return its directory."""
    directory = root / "proc" / str(pid)
    directory.mkdir(parents=True)
    stat = STAT.format(pid=pid, comm=comm, state=state, ppid=ppid, pgid=pid, sid=pid, starttime=starttime)
    (directory / "stat").write_text(stat)
    (directory / "status").write_text(STATUS.format(pid=pid, sigpnd=sigpnd, shdpnd=shdpnd))
    (directory / "cmdline").write_bytes(cmdline)
    return directory


def never_answers(directory: Path, name: str) -> None:
    """Make a file of the recorded process one that blocks whoever opens it, for ever."""
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)

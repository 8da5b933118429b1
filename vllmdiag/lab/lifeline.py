"""Nothing of a lab outlives it, not even after kill -9: a FIFO whose end of file is a SIGKILL.

The lab holds the only writing end of a FIFO. Every process of the miniature opens it for reading and asks the kernel to
send SIGKILL to its whole process group when the writing end closes (fcntl F_SETSIG, F_SETOWN, O_ASYNC). That reaches
stopped processes and those whose parent is gone, needs no thread, and leaves the children of a dead parent alive as
long as the lab lives, so that the orphans of a real server can be shown (PR_SET_PDEATHSIG would end them).
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

ENV = "VLLMDIAG_LAB"
"""The working directory of the lab that a process belongs to."""

_FIFO = "lifeline"
_F_SETSIG = 10
"""linux/fcntl.h; Python does not name it."""


def hold(work: Path) -> int:
    """Make the FIFO of a lab and hold its writing end, which programs started from here do not inherit.

    Returns:
        The descriptor. Everything of the lab dies when it is closed.
    """
    os.mkfifo(work / _FIFO)
    return os.open(work / _FIFO, os.O_RDWR | os.O_CLOEXEC)


def held(work: Path) -> bool:
    """Whether somebody holds the writing end: the lab of that directory is alive."""
    try:
        fd = os.open(work / _FIFO, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _has_writer(fd)
    finally:
        os.close(fd)


def _has_writer(fd: int) -> bool:
    """Nobody ever writes, so a read tells only whether somebody could."""
    try:
        return os.read(fd, 1) != b""
    except BlockingIOError:
        return True


def hang_on() -> None:
    """Tie this process, with its process group, to the lab named in the environment.

    Raises:
        SystemExit: the lab is gone already.
    """
    work = work_directory()
    try:
        fd = os.open(work / _FIFO, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    except OSError as error:
        raise SystemExit(f"no lab in {work}: {error}") from error
    # the lab may have died between our start and the request above
    if not _has_writer(fd):
        raise SystemExit(f"the lab of {work} has ended")


def work_directory() -> Path:
    """The directory of the lab this process belongs to.

    Raises:
        SystemExit: it belongs to none.
    """
    work = os.environ.get(ENV)
    if not work:
        raise SystemExit("this is the miniature vLLM of `vllmdiag lab up`; it does not run by itself")
    return Path(work)

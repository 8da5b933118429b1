"""A named piece of shared memory: made and unlinked by one process, attached by others without harm.

Python's resource tracker notes every `SharedMemory`, also one that was only attached, and unlinks what it noted when
its process ends: a reader that leaves would pull the ring away from everybody. So the attaching side must not be noted.
Python 3.13 has ``track=False``. Before it the note is kept from being taken, as vLLM does; taking it back afterwards
would be wrong, because spawned children share one tracker and the second to do so breaks it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any, cast
from unittest.mock import patch

from .errors import NoSegmentError, NoSpaceError, WrongSizeError

SHM_DIR = "/dev/shm"

_patching = threading.Lock()


class Segment:
    """One mapping. Only the process that made the segment unlinks it, and not its forked children.

    Attributes:
        name: as in /dev/shm, e.g. ``psm_1a2b3c4d``.
        data: all of its bytes; released by `close`.
    """

    def __init__(self, memory: SharedMemory, *, creator: bool) -> None:
        self._memory = memory
        self._unlinks_in = os.getpid() if creator else None
        self.name = memory.name
        self.data = cast(memoryview, memory.buf)

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make one of `size` zero bytes, with a name that Python chooses.

        Raises:
            NoSpaceError: /dev/shm has less than that free. tmpfs gives pages only when they are touched, so without
                this question the lack shows up as SIGBUS in the middle of a write.
        """
        free = shutil.disk_usage(SHM_DIR).free if os.path.isdir(SHM_DIR) else size
        if free < size:
            raise NoSpaceError(
                f"{SHM_DIR} has no room for a ring",
                why=f"{size} bytes are needed, {free} are free",
                next="give it more (docker: --shm-size or --ipc=host), or remove what was left there: vllmdiag shm",
            )
        return cls(SharedMemory(create=True, size=size), creator=True)

    @classmethod
    def attach(cls, name: str, size: int) -> Segment:
        """Map the segment that another process made.

        Raises:
            NoSegmentError: there is none of that name.
            WrongSizeError: it has another size than `size` bytes.
        """
        try:
            memory = _attach(name)
        except FileNotFoundError as error:
            raise NoSegmentError(
                f"there is no segment {name}",
                why="its creator has ended, or runs where another /dev/shm is mounted",
                next="compare: vllmdiag shm",
            ) from error
        except ValueError as error:  # mmap refuses an empty file
            raise WrongSizeError(f"segment {name} is empty, not {size} bytes") from error
        if memory.size != size:
            memory.close()
            raise WrongSizeError(f"segment {name} has {memory.size} bytes, not {size}")
        return cls(memory, creator=False)

    def close(self) -> None:
        """Unmap it, and unlink it if this process made it. Those who have it mapped keep it until they close."""
        self.data.release()
        self._memory.close()
        if self._unlinks_in == os.getpid():
            self._unlinks_in = None
            try:
                self._memory.unlink()
            except FileNotFoundError:  # somebody else removed the file; the tracker need not look for it
                resource_tracker.unregister(f"/{self.name.lstrip('/')}", "shared_memory")


def _attach(name: str) -> SharedMemory:
    if sys.version_info >= (3, 13):
        return SharedMemory(name=name, track=False)
    with _not_tracked():
        return SharedMemory(name=name)


@contextlib.contextmanager
def _not_tracked() -> Iterator[None]:
    def register(*_: Any) -> None:
        """Note nothing."""

    with _patching, patch.object(resource_tracker, "register", register):
        yield

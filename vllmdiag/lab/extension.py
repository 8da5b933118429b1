"""What a fault does inside a worker: methods for /collective_rpc, as a worker extension adds them to a real one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import lifeline, switches


class LabExtension:
    """Mixed into the worker of the miniature. A method does its work on one rank and returns at once on the others."""

    rank: int
    parallel: Any

    def lab_noop(self) -> str:
        """Answer."""
        return "ok"

    def lab_busy(self, name: str, rank: int, how: str) -> str:
        """Stay in one call while a switch is on: ``spin`` on the CPU, or ``sleep``."""
        if rank == self.rank:
            (switches.spin_while_on if how == "spin" else switches.sleep_while_on)(name)
        return "ok"

    def lab_collective(self, name: str, rank: int) -> str:
        """Enter a collective that no other rank enters."""
        if rank == self.rank:
            switches.entered(name)
            self.parallel.world.all_gather(None)
        return "ok"

    def lab_kernel_wait(self, name: str, rank: int) -> str:
        """Sleep in the kernel, interruptibly (S): read from a pipe that nobody writes to."""
        if rank == self.rank:
            reading, writing = os.pipe()
            switches.entered(name)
            os.read(reading, 1)
            os.close(writing)
        return "ok"

    def lab_uninterruptible(self, name: str, rank: int) -> str:
        """Sleep in the kernel, uninterruptibly (D).

        No device is needed: who starts a program by vfork sleeps in D until the child has left its memory, and this
        child opens a FIFO that nobody writes to before it executes anything. A signal that kills still reaches both.
        """
        if rank == self.rank:
            gate = self._gate(name)
            switches.entered(name)
            child = os.posix_spawn(
                "/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, gate, os.O_RDONLY, 0)]
            )
            os.waitpid(child, 0)
        return "ok"

    @staticmethod
    def _gate(name: str) -> Path:
        gate = lifeline.work_directory() / f"{name}.gate"
        if not gate.exists():
            os.mkfifo(gate)
        return gate

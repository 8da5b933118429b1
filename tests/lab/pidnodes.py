"""Nodes of a fleet on one machine: each a pid namespace with /proc, /dev/shm and a miniature server of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_ENTER = ("unshare", "--pid", "--mount", "--propagation", "private", "--fork", "--mount-proc", "--kill-child=KILL")
_OWN_SHM = 'mount -t tmpfs -o size=4g tmpfs /dev/shm && exec "$@"'


class PidNode:
    """One node: everything in it dies with it, and nothing outside sees its files in /dev/shm."""

    def __init__(self, name: str, fault: str | None = None) -> None:
        self.name, self.fault = name, fault
        self._work = tempfile.TemporaryDirectory(prefix="vllmdiag-node-")
        lab = [sys.executable, "-m", "vllmdiag", "lab", "up", "--tp", "2", *(["--fault", fault] if fault else [])]
        self._holder = subprocess.Popen(
            [*_ENTER, "sh", "-c", _OWN_SHM, "sh", *lab],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": self._work.name},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Until the server serves, or its fault is in place."""
        assert self._holder.stdout is not None
        last = "in place;" if self.fault else "http://"
        for line in self._holder.stdout:
            if line.startswith(last):
                return
        raise RuntimeError(f"node {self.name} did not come up")

    @property
    def pid(self) -> int:
        """Its first process, as seen from here."""
        holder = self._holder.pid
        return int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])

    def inside(self, *command: str) -> list[str]:
        """The command, run in the node."""
        return ["nsenter", "--target", str(self.pid), "--pid", "--mount", "--", *command]

    def end(self) -> None:
        """Nothing of it is left."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        self._work.cleanup()


@contextmanager
def pid_nodes(**faults: str | None) -> Iterator[dict[str, PidNode]]:
    """Nodes by name, each with its fault or none, all up."""
    with ExitStack() as ends:
        nodes = {}
        for name, fault in faults.items():
            nodes[name] = PidNode(name, fault)
            ends.callback(nodes[name].end)
        for node in nodes.values():
            node.wait_ready()
        yield nodes

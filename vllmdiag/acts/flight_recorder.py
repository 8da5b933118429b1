"""Ask the ranks for a dump of torch's flight recorder: one byte into the pipe that torch opened for this.

The target then runs code: it queries CUDA events under the recorder's lock and names Python frames under the GIL, and
where the driver is stuck, its next collective may wait for that. So it is done only when it was asked for.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence

from vllmdiag.model.base import Missing
from vllmdiag.model.gpu import FlightRecord
from vllmdiag.model.process import Process
from vllmdiag.sources.flight_recorder import records
from vllmdiag.vllm.gpu import gpu

WAIT_S = 5.0
"""torch looks at the pipe once a second; a recorder that is stuck never answers."""
_POLL_S = 0.2

COST = (
    "asks every rank for a dump: torch then queries CUDA events and Python frames in the server, "
    f"which may hold up its next collective; waits {WAIT_S:g} s at most"
)


def trigger(processes: Sequence[Process], root: str = "/") -> tuple[list[FlightRecord], list[Missing]]:
    """Ask, and wait for the dumps.

    Args:
        processes: members of the instance, as they were just observed.
        root: where /proc is.

    Returns:
        What `vllmdiag.sources.flight_recorder.records` finds afterwards, and a hole where there was nobody to ask.
    """
    environments = [process.environ for process in processes]
    pipes = _pipes(processes, environments, root)
    asked = sum(_ask(pipe) for pipe in pipes)
    begin = time.monotonic()
    found, holes = records(processes, environments, root)
    while asked and not _fresh(found, asked, time.monotonic() - begin) and time.monotonic() - begin < WAIT_S:
        time.sleep(_POLL_S)
        found, holes = records(processes, environments, root)
    if not pipes:
        why = "no rank has a pipe to ask through: vLLM sets none, and torch makes it only when the process starts"
        variable = gpu().flight_recorder.pipe_variables[-1]
        holes.append(Missing(what="flight recorder", why=why, next=f"start the server with {variable}=/tmp/fr_"))
    elif not asked:
        why = "the pipes are there, and nobody reads them: the monitor thread of torch does not run"
        holes.append(Missing(what="flight recorder", why=why, next="vllmdiag stacks"))
    elif not _fresh(found, asked, time.monotonic() - begin):
        why = f"{asked} ranks were asked, and not all wrote a dump within {WAIT_S:g} s: the recorder itself is held up"
        holes.append(Missing(what="flight recorder", why=why, next="vllmdiag stacks"))
    return found, holes


def _fresh(found: Sequence[FlightRecord], asked: int, elapsed_s: float) -> bool:
    return sum(record.age_s is not None and record.age_s <= elapsed_s + 1.0 for record in found) >= asked


def _pipes(processes: Sequence[Process], environments: Sequence[dict[str, str]], root: str) -> list[str]:
    """The pipes of the ranks, each once."""
    table = gpu().flight_recorder
    found: dict[tuple[int, int], str] = {}
    stems = {e[name] for e in environments for name in table.pipe_variables if name in e}
    for process in processes:
        for stem in sorted(stems):
            directory, prefix = os.path.split(os.path.join(root, "proc", str(process.pid), "root", stem.lstrip("/")))
            try:
                names = os.listdir(directory)
            except OSError:
                continue
            for name in sorted(names):
                path = os.path.join(directory, name)
                rank = name.removeprefix(prefix).removesuffix(table.pipe_suffix)
                if name == f"{prefix}{rank}{table.pipe_suffix}" and rank.isdecimal():
                    _add(found, path)
    return list(found.values())


def _add(found: dict[tuple[int, int], str], path: str) -> None:
    try:
        file = os.lstat(path)
    except OSError:
        return
    if stat.S_ISFIFO(file.st_mode):
        found[file.st_dev, file.st_ino] = path


def _ask(path: str) -> bool:
    """One byte, if somebody reads."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.ENOENT, errno.EACCES}:
            return False
        raise
    try:
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)

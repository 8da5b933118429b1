"""What labs that were killed have left: directories, which are removed, and shared memory, which is only named."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from vllmdiag.sources import observe, proc, shm
from vllmdiag.vllm.layouts import classify_file

from . import lifeline, procs
from .server import PREFIX


def clear_up() -> str:
    """Remove the directories of labs that have ended without doing so.

    Returns:
        What was found, in words, with the command that removes shared memory; empty where nothing was.
    """
    dead = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*") if not _lives(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    if not dead:
        return ""
    words = f"a lab was killed before: its directory {', '.join(map(str, dead))} is removed"
    segments = _left_in_shm()
    if segments:
        words += f"; no process that can be seen holds these in /dev/shm: {', '.join(segments)}"
        words += " (vllmdiag shm clean removes those that provably nobody holds)"
    return words


def _lives(work: Path) -> bool:
    """Whether the lab of a directory runs. At its start and its end it has no lifeline for a moment."""
    pid = work.name.removeprefix(PREFIX).partition("-")[0]
    return procs.read(int(pid)) is not None or lifeline.held(work)


def _left_in_shm() -> list[str]:
    """Segments of the size of a vLLM ring that no process holds, as far as processes can be asked."""
    here = [observe.observe(process, "/") for process in proc.scan() if process.pid == os.getpid()]
    return [
        segment.name
        for segment in shm.segments(here, "/")
        if not segment.holders and classify_file(segment.name, segment.size).ours
    ]

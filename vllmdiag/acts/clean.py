"""Remove segments of vLLM that nobody holds any more.

What was proved when the snapshot was taken is proved again right before each removal, because a process may have opened
the file since, or the name may have been given to another file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllmdiag.model.view import Removal, SegmentView
from vllmdiag.sources.shm import all_holders


def remove_orphans(segments: Iterable[SegmentView], root: str = "/") -> list[Removal]:
    """Remove those of the segments that are removable and still held by nobody.

    Args:
        segments: as a view shows them; others than removable ones are ignored.
        root: where the tree with ``proc`` and ``dev/shm`` is.

    Returns:
        One value for each removable segment, in the order given.
    """
    return [_remove(segment, root) for segment in segments if segment.orphan and segment.removable]


def _remove(segment: SegmentView, root: str) -> Removal:
    path = os.path.join(root, segment.path.lstrip("/"))
    key = (segment.dev, segment.ino)
    held = all_holders([key], root)
    if held.by_key.get(key):
        pids = ", ".join(str(holder.pid) for holder in held.by_key[key])
        return Removal(name=segment.name, removed=False, why=f"held by pid {pids} now")
    if not held.complete:
        return Removal(name=segment.name, removed=False, why="some processes cannot be asked whether they hold it")
    try:
        status = os.lstat(path)
        if (status.st_dev, status.st_ino) != key:
            return Removal(name=segment.name, removed=False, why="the name belongs to another file now")
        os.unlink(path)
    except FileNotFoundError:
        return Removal(name=segment.name, removed=False, why="gone already")
    except OSError as error:
        return Removal(name=segment.name, removed=False, why=error.strerror or type(error).__name__)
    return Removal(name=segment.name, removed=True, freed=status.st_blocks * 512)

"""The files of unix sockets: those a listener has lost, and those that a dead server has left."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from itertools import islice

from vllmdiag.model.sockets import Socket
from vllmdiag.vllm.endpoints import is_ipc_path

from . import procfs

_MOST_ENTRIES = 20_000
"""Of a directory that are looked at: /tmp of a busy machine may hold any number."""
_SURELY_BOUND_S = 60.0
"""A file as young may belong to a socket that was bound after the last look at the sockets."""


def missing_ipc_paths(sockets: Iterable[Socket], root: str = "/") -> tuple[str, ...]:
    """Paths that a listener is bound to and that no longer exist where its owner would look, sorted.

    Nobody can connect to such a listener any more (somebody cleaned /tmp). Abstract names have no file. A path whose
    absence cannot be told (no permission, owner gone) is left out.
    """
    bound = [s for s in sockets if s.family == "unix" and s.state == "LISTEN" and s.local.startswith("/")]
    gone = {s.local for s in bound if any(_absent(s.local, owner.pid, root) for owner in s.owners)}
    return tuple(sorted(gone))


def _absent(path: str, pid: int, root: str) -> bool:
    home = procfs.proc(root, pid, "root")
    try:
        os.lstat(home + path)
    except (FileNotFoundError, NotADirectoryError):
        parents = [path[:i] for i, letter in enumerate(path) if letter == "/" and i]
        try:  # after the fact, so that a process that has just ended is not taken for a lost path
            # A symlink on the way is followed from our root, which need not be the owner's.
            return os.path.samefile(home, "/") or not any(os.path.islink(home + parent) for parent in parents)
        except OSError:
            return False
    except OSError:
        pass
    return False


def stale_ipc_paths(sockets: Iterable[Socket], bound: frozenset[str], root: str = "/") -> tuple[str, ...]:
    """Socket files, named as vLLM names its own, that nobody is bound to, sorted.

    A server that is killed leaves them. They are looked for in the directories in which the given listeners have
    theirs, as the owners see them.

    Args:
        sockets: those of an instance.
        bound: paths that anybody in its network namespaces is bound to, see `SocketWatch.bound_paths`.
        root: where /proc is looked up.
    """
    homes = {
        (os.path.dirname(s.local), s.pids[0])
        for s in sockets
        if s.family == "unix" and s.state == "LISTEN" and is_ipc_path(s.local) and s.pids
    }
    first_seen = dict(sorted(homes, reverse=True))
    return tuple(sorted(path for where, pid in first_seen.items() for path in _left(where, pid, bound, root)))


def _left(directory: str, pid: int, bound: frozenset[str], root: str) -> list[str]:
    found = []
    latest = time.time() - _SURELY_BOUND_S
    try:
        with os.scandir(procfs.proc(root, pid, "root") + directory) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                path = f"{directory}/{entry.name}"
                if path in bound or not is_ipc_path(path):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode) and status.st_mtime < latest:
                    found.append(path)
    except OSError:  # not ours to read, or gone: nothing can be said
        return []
    return found

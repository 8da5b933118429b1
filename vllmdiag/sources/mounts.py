"""The type of the file system that a path lies on, as a process sees it."""

from __future__ import annotations

from . import procfs


def filesystem_of(pid: int, path: str, root: str = "/") -> str:
    """Type as in /proc/PID/mounts (``ext4``, ``nfs4``, ``fuse.sshfs``); empty where it may not be read."""
    try:
        mounts = parse_mounts(procfs.text(procfs.proc(root, pid, "mounts")))
    except OSError:
        return ""
    fitting = [(len(at), kind) for at, kind in mounts if path == at or path.startswith(at.rstrip("/") + "/")]
    # Of two on one mount point the later hides the earlier.
    longest = max((length for length, _ in fitting), default=None)
    return [kind for length, kind in fitting if length == longest][-1] if fitting else ""


def parse_mounts(text: str) -> list[tuple[str, str]]:
    """(mount point, type) of each line; a blank in a path is written in octal."""
    found = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3:
            found.append((fields[1].encode().decode("unicode_escape", "replace"), fields[2]))
    return found

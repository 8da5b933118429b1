"""The weights that a process has mapped, and the type of the file system they (and its packages) lie on."""

from __future__ import annotations

import os
import stat
from functools import partial

import msgspec

from vllmdiag.model.process import Process
from vllmdiag.model.startup import Checkpoint
from vllmdiag.vllm.stages import is_weights

from . import deadline, procfs
from .mounts import filesystem_of


class _Listing(msgspec.Struct):
    """What the child found."""

    files: int
    bytes: int
    before: int
    size: int


def with_checkpoint(process: Process, root: str = "/") -> Process:
    """The process with the checkpoint it reads, if it has a file of weights mapped or open now. Never raises."""
    path = _mapped(process.pid, root) or _open(process.pid, root)
    if path is None:
        return process
    place = procfs.proc(root, process.pid, "root") + path
    try:
        listing = msgspec.json.decode(deadline.call(partial(_list, place)), type=_Listing)
    except OSError:
        return process
    return msgspec.structs.replace(
        process,
        checkpoint=Checkpoint(
            path=path,
            files=listing.files,
            bytes=listing.bytes,
            before=listing.before,
            size=listing.size,
            filesystem=filesystem_of(process.pid, path, root),
        ),
    )


def _mapped(pid: int, root: str) -> str | None:
    """The last mapped file of weights, by address: loaders map them one after another."""
    try:
        maps = deadline.call(lambda: procfs.read(procfs.proc(root, pid, "maps"))).decode("utf-8", "replace")
    except OSError:
        return None
    paths = [line[at:] for line in maps.splitlines() if (at := line.find("/")) > 0 and is_weights(line[at:])]
    return paths[-1] if paths else None


def _open(pid: int, root: str) -> str | None:
    try:
        links = os.scandir(procfs.proc(root, pid, "fd"))
    except OSError:
        return None
    with links:
        for entry in links:
            try:
                path = os.readlink(entry.path)
            except OSError:
                continue
            if path.startswith("/") and is_weights(path):
                return path
    return None


def _list(place: str) -> bytes:
    """Runs in a child: the file system may not answer."""
    directory, name = os.path.split(place)
    ending = os.path.splitext(name)[1]
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(ending) and is_weights(entry.name):
                info = entry.stat()
                if stat.S_ISREG(info.st_mode):
                    sizes[entry.name] = info.st_size
    return msgspec.json.encode(
        _Listing(
            files=len(sizes),
            bytes=sum(sizes.values()),
            before=sum(size for other, size in sizes.items() if other < name),
            size=sizes.get(name, 0),
        )
    )

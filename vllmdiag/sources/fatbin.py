"""For which GPUs a library holds kernels: the headers in its section of fat binaries, without reading the kernels.

A fat binary is a header (magic, size of what follows) and entries, each with a header of its own that tells kind and
architecture and how long it is; so a library of hundreds of MB costs a few thousand reads of 64 bytes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from vllmdiag.model.gpu import KernelImage
from vllmdiag.model.process import Process
from vllmdiag.vllm.gpu import gpu

from . import deadline, procfs

_ELF = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_FAT = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_MAGIC = 0xBA55ED50
_SECTIONS = frozenset([b".nv_fatbin", b"__nv_relfatbin"])
_PTX, _CUBIN = 1, 2
_MOST_ENTRIES = 20_000
_MOST_SECTIONS = 500
_ARCHS = range(20, 300)
_DEADLINE_S = 2.0


def kernels_of(process: Process, root: str = "/") -> tuple[KernelImage, ...]:
    """The kernel libraries of vLLM that a process has mapped, with their architectures; never raises."""
    paths = [path for path in process.libraries if re.search(gpu().kernel_libraries, path)]
    answers = deadline.each(partial(_read, process.pid, root), paths, timeout_s=_DEADLINE_S)
    images = []
    for path, answer in zip(paths, answers, strict=True):
        archs = msgspec.json.decode(answer, type=tuple[str, ...]) if isinstance(answer, bytes) else ()
        if archs:
            images.append(KernelImage(path=path, archs=archs))
    return tuple(images)


def _read(pid: int, root: str, path: str) -> bytes:
    # Through its own root: in a container our path of that name is another file.
    place = os.path.join(procfs.proc(root, pid, "root"), path.lstrip("/"))
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return msgspec.json.encode(architectures(fd))
    finally:
        os.close(fd)


def architectures(fd: int) -> tuple[str, ...]:
    """``sm_90`` for machine code, ``compute_90`` for PTX, in ascending order; empty for a file without kernels."""
    found: set[tuple[int, str]] = set()
    for start, size in _fat_sections(fd):
        for kind, arch in _entries(fd, start, size):
            if arch not in _ARCHS:
                return ()  # not the layout that we know
            found.add((arch, f"{'compute' if kind == _PTX else 'sm'}_{arch}"))
    return tuple(name for _, name in sorted(found))


def _fat_sections(fd: int) -> Iterator[tuple[int, int]]:
    head = os.pread(fd, _ELF.size, 0)
    if len(head) < _ELF.size or head[:6] != b"\x7fELF\x02\x01":
        return
    fields = _ELF.unpack(head)
    table, size, count, names_at = fields[5], fields[10], fields[11], fields[12]
    if size != _SECTION.size or not 0 < count <= _MOST_SECTIONS or names_at >= count:
        return
    data = os.pread(fd, size * count, table)
    if len(data) < size * count:
        return
    sections = [_SECTION.unpack_from(data, i * size) for i in range(count)]
    names = os.pread(fd, min(sections[names_at][5], 1 << 20), sections[names_at][4])
    for section in sections:
        name = names[section[0] : names.find(b"\0", section[0])]
        if name in _SECTIONS:
            yield section[4], section[5]


def _entries(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    at, end = start, start + size
    for _ in range(_MOST_ENTRIES):
        head = os.pread(fd, _FAT.size, at)
        if at + _FAT.size > end or len(head) < _FAT.size:
            return
        magic, _, header, length = _FAT.unpack(head)
        if magic != _MAGIC:
            at += 8  # fat binaries are aligned; padding stands between them
            continue
        yield from _of_one(fd, at + header, min(at + header + length, end))
        at += header + length


def _of_one(fd: int, at: int, end: int) -> Iterable[tuple[int, int]]:
    for _ in range(_MOST_ENTRIES):
        head = os.pread(fd, _ENTRY.size, at)
        if at + _ENTRY.size > end or len(head) < _ENTRY.size:
            return
        kind, _, header, length, _, _, _, _, arch = _ENTRY.unpack(head)
        if kind not in (_PTX, _CUBIN) or header < _ENTRY.size:
            return
        yield kind, arch
        at += header + length

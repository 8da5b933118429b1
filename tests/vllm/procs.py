"""The ground truth of this tier: processes as /proc shows them. Its own code on purpose: it judges vllmdiag's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Proc:
    """One process at one instant."""

    pid: int
    ppid: int
    sid: int
    state: str
    title: str

    @property
    def kind(self) -> str:
        """``EngineCore``, ``Worker``, ``APIServer``, ``DPCoordinator``, ``ResourceTracker`` or ``python``."""
        found = re.match(r"\w+::([A-Za-z]+)", self.title)
        if found:
            return found.group(1)
        return "ResourceTracker" if "multiprocessing.resource_tracker" in self.title else "python"

    @property
    def rank(self) -> tuple[int, ...]:
        """The numbers of the title, in order: ``Worker_DP1_EP0`` is (1, 0)."""
        return tuple(int(number) for number in re.findall(r"(?<=[A-Z_])\d+", self.title))


def scan() -> dict[int, Proc]:
    """Every process of the machine, zombies too."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (proc := read(int(name))):
            found[proc.pid] = proc
    return found


def read(pid: int) -> Proc | None:
    """One process, or None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ppid, _, sid = stat[stat.rindex(")") + 2 :].split()[:4]
    return Proc(pid, int(ppid), int(sid), state, title)


def state(pid: int) -> str:
    """The state letter, empty where it is gone."""
    proc = read(pid)
    return proc.state if proc else ""


def children(of: Iterable[int], processes: dict[int, Proc]) -> list[Proc]:
    """Direct children, by pid."""
    parents = set(of)
    return sorted((p for p in processes.values() if p.ppid in parents), key=lambda p: p.pid)


def family(roots: Iterable[int], marker: str, processes: dict[int, Proc]) -> dict[int, Proc]:
    """The roots, their descendants, and orphans of theirs: same session, or `marker` in the environment."""
    ours = set(roots)
    # A session is named after its first process, and every root leads its own: the name outlives the process.
    members = {p.pid for p in processes.values() if p.pid in ours or p.sid in ours or (p.title and _has(p.pid, marker))}
    grew = True
    while grew:
        more = {p.pid for p in processes.values() if p.ppid in members} - members
        members |= more
        grew = bool(more)
    return {pid: processes[pid] for pid in sorted(members)}


def _has(pid: int, marker: str) -> bool:
    try:
        return marker.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def mapped(pid: int) -> set[str]:
    """Paths in a /dev/shm (its own or the machine's) that a process maps and that still have that name."""
    return set(re.findall(r" (/dev/shm/\S+)$", _maps(pid), re.MULTILINE))


def shm_files(pids: Iterable[int]) -> dict[str, int]:
    """path -> inode of the files in this machine's /dev/shm that the processes map and that still have a name.

    By inode: a semaphore is mapped under a name that glibc has removed, and lives on under another.
    """
    device = os.stat("/dev/shm").st_dev
    here = f"{os.major(device):02x}:{os.minor(device):02x}"
    held = {inode for pid in pids for dev, inode in _mapped_inodes(pid) if dev == here}
    with os.scandir("/dev/shm") as entries:
        return {entry.path: entry.inode() for entry in entries if entry.inode() in held}


def _mapped_inodes(pid: int) -> set[tuple[str, int]]:
    return {(dev, int(inode)) for dev, inode in re.findall(r" ([0-9a-f]+:[0-9a-f]+) (\d+) +/dev/shm/", _maps(pid))}


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def unlink_shm(files: dict[str, int]) -> None:
    """Remove those that are still the same file and that no process maps any more."""
    in_use = set(shm_files(scan()))
    for path, inode in files.items():
        if path not in in_use and _inode(path) == inode:
            Path(path).unlink(missing_ok=True)


def unix_paths(pids: Iterable[int]) -> set[str]:
    """Paths that sockets of the processes are bound to."""
    inodes = {link[8:-1] for pid in pids for link in _links(pid) if link.startswith("socket:[")}
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("/")}


def _links(pid: int) -> Iterator[str]:
    """What its descriptors point to; those that close meanwhile are left out."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None

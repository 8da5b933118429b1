"""The rest about one process of interest: what `proc.scan` leaves out because it costs more or needs permission."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Limits, Memory, Namespaces, Process
from vllmdiag.vllm import footprint
from vllmdiag.vllm.gpu import gpu

from . import deadline, procfs
from .fds import DELETED, descriptors
from .proc import parse_fields, parse_stat

T = TypeVar("T")

_LIMIT_ROWS = {
    "nofile": "Max open files",
    "nproc": "Max processes",
    "memlock": "Max locked memory",
    "core": "Max core file size",
    "address_space": "Max address space",
}
_DIST_INFO = re.compile(r"(?P<name>[A-Za-z0-9_.]+?)-(?P<version>\d[^-+]*)(\+[^-]*)?\.dist-info")
_MAPPED_PATH = re.compile(rb"^\S+ \S+ \S+ \S+ \d+ +(/.*)$", re.MULTILINE)
_KIB = re.compile(r"[0-9]+ kB")
_SITE = re.compile(r"^(.*/(?:site|dist)-packages)/")


def observe(base: Process, root: str = "/", *, allowed: Collection[str] = (), deep: bool = False) -> Process:
    """`observe_all` of one process."""
    return observe_all([base], root, allowed=allowed, deep=deep)[0]


def observe_all(
    bases: Sequence[Process], root: str = "/", *, allowed: Collection[str] = (), deep: bool = False
) -> list[Process]:
    """Each of `bases` with all that /proc tells of it. Never raises: what cannot be had is a `Missing` in ``missing``.

    Args:
        bases: from `proc.scan`; identity and samples are kept.
        root: where the tree with ``proc`` is.
        allowed: names of environment variables to record. Of a proxy variable only ``set`` is kept.
        deep: also sum up the memory maps (smaps_rollup), which walks the page tables of the target.
    """
    # First what never blocks.
    looks = [_Look(base, root) for base in bases]
    # Then the reads that wait for the target's mmap_lock, all in one child: a fork for each would cost more than the
    # reads. What is late for one process says nothing about the next.
    names = ("environ", "maps", "smaps_rollup") if deep else ("environ", "maps")
    files = [(base.pid, name) for base in bases for name in names]
    answers = iter(deadline.each(partial(_read, root), files, group=itemgetter(0)))
    seen = [look.finish({name: next(answers) for name in names}, allowed) for look in looks]
    seen = [_of_the_same(process, base, root) for process, base in zip(seen, bases, strict=True)]
    versions = _Versions(root)
    return [
        msgspec.structs.replace(process, vllm_version=versions.of(process), packages=versions.packages(process))
        for process in seen
    ]


def _of_the_same(process: Process, base: Process, root: str) -> Process:
    """Without anything that may have been read of another process, which has been given the pid meanwhile."""
    try:
        stat = parse_stat(procfs.read(procfs.proc(root, base.pid, "stat")))
    except OSError:
        return process  # nobody has the pid: what could be read was read in time
    if stat is None or stat.starttime == base.starttime:
        return process
    hole = Missing(
        what=f"facts of pid {base.pid}", why="it has ended, and another process has its pid now", next="vllmdiag ps"
    )
    return msgspec.structs.replace(
        base, exe=hole, limits=hole, namespaces=hole, shm_fds=hole, socket_inodes=hole, missing=(*base.missing, hole)
    )


class _Look:
    """One process under observation: what was read so far, and what could not be."""

    def __init__(self, base: Process, root: str) -> None:
        pid = base.pid
        self._base, self._holes = base, list(base.missing)
        self._wchan = _or(self._ask("wchan", lambda: _wchan(pid, root)), "")
        self._syscall = _or(
            self._ask("system call", lambda: _first_word(procfs.text(procfs.proc(root, pid, "syscall")))), ""
        )
        self._kernel_stack = _or(
            self._ask("kernel stack", lambda: _kernel_stack(pid, root), hint="run as root (CAP_SYS_ADMIN)"), ()
        )
        self._exe = self._ask("executable", lambda: os.readlink(procfs.proc(root, pid, "exe")))
        self._namespaces = self._ask("namespaces", lambda: _namespaces(pid, root))
        self._limits = self._ask("limits", lambda: _limits(procfs.text(procfs.proc(root, pid, "limits"))))
        self._opened = descriptors(pid, root)
        self._holes += self._opened.missing
        self._last_ran = last_ran(pid, root)

    def _ask(self, what: str, read: Callable[[], T], **hint: str) -> T | Missing:
        try:
            return read()
        except OSError as error:
            hole = procfs.missing(f"{what} of pid {self._base.pid}", error, **hint)
            self._holes.append(hole)
            return hole

    def finish(self, slow: dict[str, bytes | OSError], allowed: Collection[str]) -> Process:
        """The process, with what the slow reads gave."""
        environ, complete = _or(
            self._ask("environment", lambda: _environ(_answer(slow["environ"]), allowed)), ({}, False)
        )
        libraries = _or(self._ask("memory map", lambda: _libraries(_answer(slow["maps"]))), ())
        deep = "smaps_rollup" in slow
        memory = self._ask("memory", lambda: _memory(_answer(slow["smaps_rollup"]))) if deep else None
        return msgspec.structs.replace(
            self._base,
            wchan=self._wchan,
            syscall=self._syscall,
            kernel_stack=self._kernel_stack,
            exe=self._exe,
            namespaces=self._namespaces,
            limits=self._limits,
            n_fds=self._opened.n_fds,
            shm_fds=self._opened.shm,
            socket_inodes=self._opened.sockets,
            device_files=self._opened.devices,
            environ=environ,
            environ_complete=complete,
            libraries=libraries,
            memory=memory,
            last_ran_s=self._last_ran,
            missing=tuple(self._holes),
        )


def vllm_version(process: Process, root: str = "/") -> str | None:
    """The vLLM release a process runs, from the dist-info in its own file system; None where that is not found."""
    return _Versions(root).of(process)


class _Versions:
    """Releases by the directory they were found in: the processes of a server share it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._found: dict[tuple[object, str], dict[str, str]] = {}

    def of(self, process: Process) -> str | None:
        """The release one process runs."""
        found = self._beside(process)
        return next((found[name] for name in footprint.DISTRIBUTIONS if name in found), None)

    def packages(self, process: Process) -> dict[str, str]:
        """Versions of the kernel libraries that are installed beside it."""
        found = self._beside(process)
        wanted = gpu().packages.items()
        return {name: found[one] for name, names in wanted for one in names[::-1] if one in found}

    def _beside(self, process: Process) -> dict[str, str]:
        """Distributions of the directory in which vLLM was found, with their versions; empty where it was not."""
        space = process.namespaces.mnt if isinstance(process.namespaces, Namespaces) else process.pid
        for directory in _site_packages(process):
            key = (space, directory)
            if key not in self._found:
                # Through its own root: in a container our path of that name is another file.
                place = os.path.join(procfs.proc(self._root, process.pid, "root"), directory.lstrip("/"))
                self._found[key] = _distributions_in(place)
            if self._found[key].keys() & set(footprint.DISTRIBUTIONS):
                return self._found[key]
        return {}


def _distributions_in(place: str) -> dict[str, str]:
    try:
        names = deadline.call(partial(_list, place)).decode("utf-8", "replace")
    except OSError:
        return {}
    return {match["name"]: match["version"] for name in names.split("\0") if (match := _DIST_INFO.fullmatch(name))}


def _list(directory: str) -> bytes:
    return os.fsencode("\0".join(os.listdir(directory)))


def _read(root: str, file: tuple[int, str]) -> bytes:
    return procfs.read(procfs.proc(root, *file))


def _or(value: T | Missing, otherwise: T) -> T:
    return otherwise if isinstance(value, Missing) else value


def _answer(result: bytes | OSError) -> bytes:
    if isinstance(result, OSError):
        raise result
    return result


def _first_word(text: str) -> str:
    return text.partition(" ")[0].strip()


def _wchan(pid: int, root: str) -> str:
    name = procfs.text(procfs.proc(root, pid, "wchan")).strip()
    return "" if name == "0" else name


def _kernel_stack(pid: int, root: str) -> tuple[str, ...]:
    lines = procfs.text(procfs.proc(root, pid, "stack")).splitlines()
    return tuple(line.partition("] ")[2] or line for line in lines)


def _namespaces(pid: int, root: str) -> Namespaces:
    def inode(name: str) -> int:
        return int(re.sub(r"\D", "", os.readlink(procfs.proc(root, pid, "ns", name))))

    return Namespaces(mnt=inode("mnt"), pid=inode("pid"), net=inode("net"), ipc=inode("ipc"), user=inode("user"))


def _limits(text: str) -> Limits:
    soft: dict[str, int | None] = {}
    for line in text.splitlines():
        for field, title in _LIMIT_ROWS.items():
            if line.startswith(title):
                word = _first_word(line[len(title) :].lstrip())
                soft[field] = int(word) if word.isdigit() else None
    return Limits(**soft)


def _environ(data: bytes, allowed: Collection[str]) -> tuple[dict[str, str], bool]:
    """The allowed variables, and whether the area is whole.

    setproctitle writes its title over argv and the environment behind it, and fills up with NULs: then only a tail is
    left, and the first string of the tail may be the end of a longer one.
    """
    entries = data.rstrip(b"\0").split(b"\0")
    complete = b"=" in entries[0]
    if not complete:
        tail = [entry for entry in entries if entry]
        entries = tail[1:]
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in entries)
    found = {name: "set" if name.lower().endswith("_proxy") else value for name, _, value in pairs if name in allowed}
    return found, complete


def _libraries(maps: bytes) -> tuple[str, ...]:
    paths = {path.decode("utf-8", "replace").removesuffix(DELETED) for path in _MAPPED_PATH.findall(maps)}
    return tuple(sorted(path for path in paths if footprint.is_library(path)))


def _memory(rollup: bytes) -> Memory:
    kib = {name: int(value[:-3]) for name, value in parse_fields(rollup).items() if _KIB.fullmatch(value)}

    def total(*names: str) -> int:
        return sum(kib.get(name, 0) for name in names) * 1024

    return Memory(
        rss=total("Rss"),
        pss=total("Pss"),
        shared=total("Shared_Clean", "Shared_Dirty"),
        private=total("Private_Clean", "Private_Dirty"),
        pss_shmem=total("Pss_Shmem"),
    )


def last_ran(pid: int, root: str) -> float | None:
    """Seconds since the scheduler last ran the main thread; None where this kernel does not show it."""
    try:
        # Our own value stands for now: we are running, and the scheduler's clock is not the one of the uptime.
        now, then = (
            float(parse_fields(procfs.read(procfs.proc(root, who, "sched")))["se.exec_start"]) for who in ("self", pid)
        )
        return max(0.0, now - then) / 1000
    except (OSError, KeyError, ValueError):
        return None


def _site_packages(process: Process) -> list[str]:
    """Directories that may hold the dist-info, the surest first."""
    places = [found[1] for path in process.libraries if (found := _SITE.match(path))]
    # The executable is the base interpreter, and tells the release of Python; a virtual environment shows only in the
    # words of the command line.
    python = os.path.basename(process.exe) if isinstance(process.exe, str) else ""
    words = () if isinstance(process.cmdline, Missing) else process.cmdline[:2]
    prefixes = [os.path.dirname(os.path.dirname(word)) for word in words if word.startswith("/")]
    places += [os.path.join(prefix, "lib", python, "site-packages") for prefix in prefixes if python]
    return list(dict.fromkeys(places))

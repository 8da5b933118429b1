"""All processes of the machine, cheaply, and samples of one process or of its threads."""

from __future__ import annotations

import os
import struct
from functools import partial
from typing import NamedTuple

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process, ProcessSample, ThreadSample

from . import deadline, procfs

_SIZES = struct.Struct("<II")  # bytes of stat, bytes of status; the rest is cmdline
_SIGKILL_BIT = 1 << 8


class Stat(NamedTuple):
    """What is used of stat(5)."""

    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    majflt: int
    utime: float
    stime: float
    starttime: int
    rss: int


def scan(root: str = "/") -> list[Process]:
    """Every visible process: identity, state, title and the fields of status; ascending by pid.

    Each has one sample with ``t=0`` (without io). A process that ends during the scan is left out. One child does the
    reading, because cmdline may block; where it does, the cmdline is `Missing` and the rest is there.
    """
    now_s = procfs.uptime(root)
    pids = procfs.pids(root)
    found = []
    for pid, answer in zip(pids, deadline.each(partial(_read, root), pids), strict=True):
        if isinstance(answer, TimeoutError):
            process = _without_cmdline(root, pid, now_s, answer)
        else:
            process = None if isinstance(answer, OSError) else _process(pid, answer, now_s)
        if process is not None:
            found.append(process)
    return found


def sample(pid: int, starttime: int, t: float, root: str = "/") -> ProcessSample:
    """One look at a process; state "" when it is gone or another process has its pid now.

    Args:
        pid: the process.
        starttime: clock ticks after boot, its second half of identity.
        t: seconds after the start of the window, recorded as it is.
        root: where the tree with ``proc`` is.
    """
    try:
        directory = os.open(procfs.proc(root, pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ProcessSample(t=t, state="")
    try:
        stat = parse_stat(procfs.read("stat", directory))
        if stat is None or stat.starttime != starttime:
            return ProcessSample(t=t, state="")
        io = _io(directory)
        run_delay = _run_delay(directory)
    except OSError:
        return ProcessSample(t=t, state="")
    finally:
        os.close(directory)
    return ProcessSample(
        t=t,
        state=stat.state,
        utime=stat.utime,
        stime=stat.stime,
        majflt=stat.majflt,
        rss=stat.rss,
        read_bytes=io.get("read_bytes"),
        rchar=io.get("rchar"),
        run_delay=run_delay,
    )


def sample_threads(pid: int, t: float, root: str = "/") -> dict[int, tuple[str, ThreadSample]]:
    """Comm and sample of every thread, by tid; empty when the process is gone. One that ends meanwhile is left out."""
    base = procfs.proc(root, pid, "task")
    try:
        names = os.listdir(base)
    except OSError:
        return {}
    threads = {}
    for tid in sorted(int(name) for name in names if name.isdigit()):
        try:
            stat = parse_stat(procfs.read(f"{base}/{tid}/stat"))
        except OSError:
            continue
        if stat is not None:
            threads[tid] = stat.comm, ThreadSample(t=t, state=stat.state, utime=stat.utime, stime=stat.stime)
    return threads


def parse_stat(data: bytes) -> Stat | None:
    """stat(5) of a process or thread; None where the text is not one. The comm may hold any byte, also ``)``."""
    opened, closed = data.find(b"("), data.rfind(b")")
    fields = data[closed + 1 :].split()
    if opened < 0 or closed < opened or len(fields) < 22:
        return None
    try:
        return Stat(
            comm=data[opened + 1 : closed].decode("utf-8", "replace"),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            pgid=int(fields[2]),
            sid=int(fields[3]),
            majflt=int(fields[9]),
            utime=int(fields[11]) / procfs.CLOCK_TICKS,
            stime=int(fields[12]) / procfs.CLOCK_TICKS,
            starttime=int(fields[19]),
            rss=int(fields[21]) * procfs.PAGE_SIZE,
        )
    except ValueError:
        return None


def parse_cmdline(data: bytes) -> tuple[str, ...]:
    """argv; one element where setproctitle wrote a title over it (it pads the rest of the area with NULs or spaces)."""
    words = data.rstrip(b"\0 ").decode("utf-8", "replace")
    return tuple(words.split("\0")) if words else ()


def parse_fields(data: bytes) -> dict[str, str]:
    """``Name: value`` lines, as in status, io and smaps_rollup."""
    # Not splitlines: a process may put a form feed into its name.
    pairs = (line.partition(":") for line in data.decode("utf-8", "replace").split("\n"))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _read(root: str, pid: int, *, with_cmdline: bool = True) -> bytes:
    """The stat, status and cmdline of one process: its directory handle never leads to a later owner of the pid."""
    directory = os.open(procfs.proc(root, pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stat = procfs.read("stat", directory)
        status = procfs.read("status", directory)
        cmdline = procfs.read("cmdline", directory) if with_cmdline else b""
    finally:
        os.close(directory)
    return _SIZES.pack(len(stat), len(status)) + stat + status + cmdline


def _without_cmdline(root: str, pid: int, now_s: float, error: TimeoutError) -> Process | None:
    try:
        raw = _read(root, pid, with_cmdline=False)
    except OSError:
        return None
    return _process(pid, raw, now_s, procfs.missing(f"command line of pid {pid}", error))


def _process(pid: int, raw: bytes, now_s: float, hole: Missing | None = None) -> Process | None:
    n_stat, n_status = _SIZES.unpack_from(raw)
    middle, end = _SIZES.size + n_stat, _SIZES.size + n_stat + n_status
    stat = parse_stat(raw[_SIZES.size : middle])
    status = parse_fields(raw[middle:end])
    if stat is None:
        return None
    uid = status.get("Uid", "").split()
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return Process(
        pid=pid,
        starttime=stat.starttime,
        age_s=max(0.0, now_s - stat.starttime / procfs.CLOCK_TICKS),
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        uid=int(uid[1]) if len(uid) > 1 else None,
        comm=stat.comm,
        cmdline=hole or parse_cmdline(raw[end:]),
        tracer_pid=int(status.get("TracerPid", "0")),
        sigkill_pending=bool(pending & _SIGKILL_BIT),
        nspids=tuple(map(int, status.get("NSpid", "").split())),
        samples=(
            ProcessSample(
                t=0.0, state=stat.state, utime=stat.utime, stime=stat.stime, majflt=stat.majflt, rss=stat.rss
            ),
        ),
        missing=(hole,) if hole else (),
    )


def _run_delay(directory: int) -> float | None:
    """Seconds; None where the kernel keeps no such account."""
    try:
        return int(procfs.read("schedstat", directory).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _io(directory: int) -> dict[str, int]:
    try:
        fields = parse_fields(procfs.read("io", directory))
    except OSError:  # another user's
        return {}
    return {name: int(value) for name, value in fields.items() if value.isdigit()}

"""Python stacks of running processes, by py-spy: the whole life of the helper program is handled here.

By default a target is never paused: ``--nonblocking`` makes no ptrace call. Such a read is not consistent, so a garbled
one is repeated; a hang is stable and shows the same in every dump. ``--locals`` is never asked for: prompts live there.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.errors import BadDataError, UsageError
from vllmdiag.model.process import Frame, StackDump, ThreadStack

from . import helper, procfs
from .proc import parse_fields, parse_stat

ATTEMPTS = 3
MAX_OUTPUT = 16 << 20

_MAIN = "MainThread"
_SITE = ("site-packages/", "dist-packages/")
_NOT_PERMITTED = ("permission denied", "operation not permitted", "(os error 13)", "(os error 1)")
_PERMISSION = "run it as root, or with CAP_SYS_PTRACE (docker: --cap-add SYS_PTRACE)"
_RETRY = "look again"


def find_py_spy() -> str | Missing:
    """Path of py-spy: beside this interpreter, in its scripts directory, or on PATH."""
    directories = (os.path.dirname(sys.executable), sysconfig.get_path("scripts"))
    path = os.pathsep.join((*directories, os.environ.get("PATH", os.defpath)))
    found = shutil.which("py-spy", path=path)
    return found or Missing(what="stacks", why="py-spy is not installed", next="pip install py-spy")


class StackSampler:
    """Dumps the stacks of some processes, all at once, again and again within one window.

    Args:
        pids: the processes.
        deadline_s: seconds after which a dump that is not there is given up as late; one for all processes of a dump.
        py_spy: the program; found by `find_py_spy` where not given.
        native: also frames of native extensions. Pauses the target for 0.1 to 0.8 s.
        blocking: pause the target for a consistent read (about 10 ms with 2 threads, 0.3 s with 50).
    """

    def __init__(
        self,
        pids: Iterable[int],
        deadline_s: float = 5.0,
        *,
        py_spy: str | Missing | None = None,
        native: bool = False,
        blocking: bool = False,
    ) -> None:
        self._pids = tuple(dict.fromkeys(pids))
        self._deadline_s = deadline_s
        self._py_spy = find_py_spy() if py_spy is None else py_spy
        self._pausing = native or blocking  # native frames cannot be read without a pause
        self._mode = ("--native",) if native else () if blocking else ("--nonblocking",)
        self._hopeless: dict[int, Missing] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Give up: a dump in progress ends within 0.1 s, its helpers killed and reaped; no other one begins."""
        self._stopped.set()

    def dump(self, t: float, deadline_s: float | None = None) -> dict[int, StackDump]:
        """One dump of every process. Takes at most the deadline.

        A process that is gone or runs no Python is asked once; later dumps repeat the answer.

        Args:
            t: seconds after the start of the window, recorded as it is.
            deadline_s: for this dump, where less time is left than the sampler was given.

        Raises:
            UsageError: a pausing mode was asked for and a process is stopped, traced or in uninterruptible sleep:
                attaching could hang for ever.
        """
        if self._pausing:
            self._refuse_stuck()
        patience_s = self._deadline_s if deadline_s is None else deadline_s
        start = time.monotonic()
        dumps: dict[int, StackDump] = {}
        # A helper that hangs costs no CPU, one that works does: let some more run than there are processors.
        slots = threading.Semaphore(max(16, 2 * (os.cpu_count() or 1)))

        def work(pid: int) -> None:
            with slots:
                began = time.monotonic()
                threads = self._stacks(pid, start + patience_s, patience_s)
                took = time.monotonic() - began
                dumps[pid] = StackDump(t=t + began - start, threads=threads, took_s=took)

        workers = [threading.Thread(target=work, args=(pid,), name="vllmdiag-stacks") for pid in self._pids]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return {pid: dumps[pid] for pid in self._pids}

    def _refuse_stuck(self) -> None:
        for pid in self._pids:
            state = _state(pid)
            if state in ("D", "T", "t"):
                raise UsageError(
                    f"will not pause pid {pid} for its stacks",
                    why=f"it is in state {state}: attaching to it could hang, or leave it stopped",
                    next="use the default mode, which pauses nothing",
                )

    def _stacks(self, pid: int, deadline: float, patience_s: float) -> tuple[ThreadStack, ...] | Missing:
        if isinstance(self._py_spy, Missing):
            return self._py_spy
        if pid in self._hopeless:
            return self._hopeless[pid]
        command = (self._py_spy, "dump", "--json", *self._mode, "--pid", str(pid))
        result: tuple[ThreadStack, ...] | Missing = _missing(pid, "late: not started before the deadline", _RETRY)
        for _ in range(ATTEMPTS):
            hopeless = _dead(pid)
            if hopeless is None and time.monotonic() < deadline and not self._stopped.is_set():
                try:
                    output = helper.run(command, deadline, MAX_OUTPUT, self._stopped)
                except OSError as error:
                    return procfs.missing(f"stacks of pid {pid}", error, hint="reinstall py-spy")
                hopeless = _refused(pid, output)
                result = hopeless or _judge(pid, output, patience_s)
            if hopeless:
                self._hopeless[pid] = hopeless
                return hopeless
            if time.monotonic() >= deadline or self._stopped.is_set() or _complete(result):
                break
        return result


def _missing(pid: int, why: str, next: str) -> Missing:
    return Missing(what=f"stacks of pid {pid}", why=why, next=next)


def _state(pid: int) -> str:
    """State letter of stat(5); empty when gone."""
    try:
        stat = parse_stat(procfs.read(procfs.proc("/", pid, "stat")))
    except OSError:
        return ""
    return stat.state if stat else ""


def _dead(pid: int) -> Missing | None:
    """Why a process that has ended has no stacks; None for a living one."""
    state = _state(pid)
    if state and state not in "ZXx":
        return None
    return _missing(pid, "the process is a zombie" if state else "the process has ended", "look again")


def _refused(pid: int, output: helper.Output) -> Missing | None:
    """The refusals that asking again does not change. py-spy always exits with 1, so its words must do."""
    if output.code in (0, None):
        return None
    words = _first_lines(output)
    if any(mark in words.lower() for mark in _NOT_PERMITTED):
        return _missing(pid, f"EACCES: py-spy may not read the process: {words}", _PERMISSION)
    if "find python version" in words.lower():
        return _missing(pid, "py-spy finds no Python interpreter in it", "vllmdiag ps")
    return _dead(pid)  # it may have ended under py-spy's hands


def _judge(pid: int, output: helper.Output, deadline_s: float) -> tuple[ThreadStack, ...] | Missing:
    if output.late:
        state = _state(pid) or "gone"
        return _missing(pid, f"late: py-spy gave no answer within {deadline_s:g} s (process state {state})", _RETRY)
    if output.too_much:
        return _missing(pid, f"py-spy wrote more than {MAX_OUTPUT >> 20} MiB", _RETRY)
    if output.code != 0:
        return _missing(pid, f"py-spy failed: {_first_lines(output) or output.code}", _RETRY)
    try:
        threads = parse_py_spy_json(output.out)
    except BadDataError as error:
        return _missing(pid, f"py-spy: {error.why}", _RETRY)
    if not any(thread.frames for thread in threads):
        return _missing(pid, "py-spy read only empty stacks", _RETRY)
    return _outer_tids(pid, threads)


def _complete(result: tuple[ThreadStack, ...] | Missing) -> bool:
    """Whether it is worth no other attempt: the main thread, which sorts first, has frames."""
    return not isinstance(result, Missing) and bool(result[0].frames)


def _first_lines(output: helper.Output) -> str:
    """py-spy's own words: what stands before the backtrace of its implementation, on one line."""
    text = output.err.decode("utf-8", "replace").partition("Stack backtrace")[0]
    return " ".join(text.split()).removeprefix("Error: ")[:300]


def _outer_tids(pid: int, threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Thread ids as we see them. From Python 3.11 on they come out of the target's memory, in its own pid namespace."""
    inner_to_outer = {}
    try:
        for name in os.listdir(procfs.proc("/", pid, "task")):
            status = parse_fields(procfs.read(procfs.proc("/", pid, "task", name, "status")))
            *outer, inner = status["NSpid"].split()
            if not outer:
                return threads  # it lives in our namespace
            inner_to_outer[int(inner)] = int(name)
    except (OSError, KeyError, ValueError):
        return threads
    if not all(thread.tid in inner_to_outer for thread in threads if thread.tid is not None):
        return threads
    mapped = []
    for thread in threads:
        tid = None if thread.tid is None else inner_to_outer[thread.tid]
        mapped.append(msgspec.structs.replace(thread, tid=tid, name=thread.name or (_MAIN if tid == pid else "")))
    return tuple(sorted(mapped, key=_order))


class _PySpyFrame(msgspec.Struct):
    name: str = ""
    filename: str | None = None
    short_filename: str | None = None
    line: int = 0


class _PySpyThread(msgspec.Struct):
    pid: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_PySpyFrame] = []


def parse_py_spy_json(data: bytes) -> tuple[ThreadStack, ...]:
    """The threads in ``py-spy dump --json``: the main thread first, then by thread id. Unknown fields are ignored.

    Raises:
        BadDataError: it is not JSON of that shape.
    """
    try:
        threads = msgspec.json.decode(data, type=list[_PySpyThread])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError("not the output of py-spy dump --json", why=str(error)) from error
    found = [
        ThreadStack(
            name=thread.thread_name or (_MAIN if thread.os_thread_id == thread.pid is not None else ""),
            tid=thread.os_thread_id,
            active=thread.active,
            owns_gil=thread.owns_gil,
            frames=tuple(Frame(name=f.name, file=_short(f), line=f.line) for f in thread.frames),
        )
        for thread in threads
    ]
    return tuple(sorted(found, key=_order))


def _order(thread: ThreadStack) -> tuple[bool, int]:
    return thread.name != _MAIN, thread.tid or 0


def _short(frame: _PySpyFrame) -> str:
    if frame.short_filename:
        return frame.short_filename
    path = frame.filename or ""
    for mark in _SITE:
        path = path.rpartition(mark)[2]
    return path

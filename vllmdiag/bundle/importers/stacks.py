"""Stacks as text: py-spy dump, pystack and Python's own faulthandler. Arguments and locals are never kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.process import Frame, ThreadStack

from .format import Context, Format, Reader, block

_PROCESS = re.compile(r"^\s*Process (\d+): ?(.*)$")
_PYTHON = re.compile(r"^\s*Python v[\d.]+")
_THREAD = re.compile(
    r'^\s*Thread (0x[0-9a-fA-F]+|\d+)(?: \((?P<state>idle|active|active\+gil|idle\+gil)\))?(?:: "(?P<name>.*)")?\s*$'
)
_FRAME = re.compile(r"^\s*(?P<name>\S.*?) \((?P<file>[^()\s][^()]*?)(?::(?P<line>\d+))?\)\s*$")
_CUT = re.compile(r"^\s+(?:[\w.<>:~*&\[\]]+)(?: \([^()]*)?$")
_DETAILS = re.compile(r"^\s+(?:Arguments|Locals):\s*$|^\s{8,}[\w.]+: ")
_RANK = re.compile(r"\brank[ =]?(\d+)\b")


class _PySpy(Reader):
    """The dumps of several processes, one after another."""

    def __init__(self, context: Context, draft: Draft) -> None:
        self._context, self._draft = context, draft
        self._pid = context.pid
        self._title = ""
        self._threads: list[ThreadStack] = []
        self._head: tuple[int | None, str, str] | None = None
        self._frames: list[Frame] = []
        self._cut = ""

    def take(self, line: str) -> bool:
        process = _PROCESS.match(line)
        if process is not None:
            self._flush()
            self._pid, self._title = int(process[1]), process[2].strip()
            return True
        thread = _THREAD.match(line)
        if thread is not None:
            self._end_thread()
            number = thread[1]
            tid = int(number) if not number.startswith("0x") else None
            self._head = (tid, thread["state"] or "", thread["name"] or "")
            return True
        if _PYTHON.match(line) or not line.strip() or _DETAILS.match(line):
            return True
        return self._head is not None and self._frame(line)

    def _frame(self, line: str) -> bool:
        """One frame; a tracker or a terminal may have broken it into two lines."""
        text = self._cut + line.strip() if self._cut else line
        found = _FRAME.match(text)
        if found is not None:
            self._cut = ""
            self._frames.append(Frame(name=found["name"].strip(), file=found["file"], line=int(found["line"] or 0)))
            return True
        if not self._cut and _CUT.match(line):
            self._cut = line.rstrip() + ("" if "(" in line else " ")
            return True
        self._cut = ""
        return False

    def close(self) -> None:
        self._flush()

    def _end_thread(self) -> None:
        if self._head is None:
            return
        tid, state, name = self._head
        if self._frames:
            self._threads.append(
                ThreadStack(
                    name=name,
                    tid=tid if tid is not None else self._pid if name == "MainThread" else None,
                    active=state.startswith("active"),
                    owns_gil=state.endswith("+gil"),
                    frames=tuple(self._frames),
                )
            )
        self._head, self._frames, self._cut = None, [], ""

    def _flush(self) -> None:
        self._end_thread()
        threads, self._threads = self._threads, []
        title, self._title = self._title, ""
        if threads:
            record(self._draft, self._context, self._pid, threads, title)
        elif title and self._pid is not None:
            self._draft.process(self._pid, self._context).facts.setdefault("cmdline", (title,))


def record(draft: Draft, context: Context, pid: int | None, threads: list[ThreadStack], title: str = "") -> None:
    """Put one dump of one process into the draft.

    Args:
        draft: of the snapshot.
        context: of the section.
        pid: of the process; where it is not known, the thread that runs its main program tells it.
        threads: with frames, innermost first.
        title: its command line or title, where the dump names it.
    """
    known = pid if pid is not None else _main_tid(threads)
    if known is None:
        only = draft.target()
        if only is None:
            draft.missing(
                f"whose stacks {context.source} shows from line {context.line}",
                "the dump does not name the process",
                "include the line `Process PID: ...` of py-spy dump",
            )
            return
        process = only
    else:
        process = draft.process(known, context)
    if title:
        process.facts.setdefault("cmdline", (title,))
        if rank := _RANK.search(title):
            process.facts.setdefault("rank", int(rank[1]))
    ordered = sorted(threads, key=lambda t: t.name != "MainThread" and t.tid != known)
    process.dump(context.look, ordered)


def _main_tid(threads: Sequence[ThreadStack]) -> int | None:
    """The kernel's id of the main thread equals the pid."""
    named = [t.tid for t in threads if t.name == "MainThread" and t.tid is not None]
    if named:
        return named[0]
    bottom = [t.tid for t in threads if t.tid is not None and t.frames[-1].name.endswith(("<module>", "_main", "main"))]
    return bottom[0] if bottom else None


# -- pystack ----------------------------------------------------------------------------------------------------------

_PYSTACK = re.compile(r"^\s*Traceback for thread (\d+)(?: \((?P<comm>[^)]*)\))?(?: \[(?P<marks>.*?)\])?.*:\s*$")
_PYSTACK_FRAME = re.compile(
    r'^\s*\((?:Python|C|C\+\+|Cython)\) File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>.+?)(?: \(.*\))?\s*$'
)


@dataclass
class _Thread:
    tid: int
    gil: bool
    frames: list[Frame] = field(default_factory=list)


def _read_pystack(lines: Sequence[str], context: Context, draft: Draft) -> None:
    threads: list[_Thread] = []
    for line in lines:
        head = _PYSTACK.match(line)
        frame = _PYSTACK_FRAME.match(line)
        if head is not None:
            threads.append(_Thread(int(head[1]), "Has the GIL" in (head["marks"] or "")))
        elif frame is not None and threads:
            threads[-1].frames.append(Frame(name=frame["name"], file=short(frame["file"]), line=int(frame["line"])))
    found = [
        ThreadStack(name="", tid=t.tid, active=t.gil, owns_gil=t.gil, frames=tuple(reversed(t.frames)))
        for t in threads
        if t.frames
    ]
    tids = [t.tid for t in found if t.tid is not None]
    pid = context.pid if context.pid in tids else _main_tid(found) or min(tids, default=None)
    if found:
        named = [_named_main(t) if t.tid == pid else t for t in found]
        record(draft, context, pid, named)


def _named_main(thread: ThreadStack) -> ThreadStack:
    return msgspec.structs.replace(thread, name="MainThread")


_SITE = ("site-packages/", "dist-packages/")
_STDLIB = re.compile(r"^.*/lib/python3[.\d]*t?/")


def short(path: str) -> str:
    """A path as py-spy shortens it: ``vllm/v1/engine/core.py``, ``threading.py``."""
    for mark in _SITE:
        if mark in path:
            return path.rpartition(mark)[2]
    return _STDLIB.sub("", path)


# -- faulthandler -----------------------------------------------------------------------------------------------------

_FAULT = re.compile(
    r"^(?:.*?\s)?(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^(?:.*?\s)?\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)\s*$')
_PREFIX = re.compile(r"\((?P<label>[A-Z]\w*(?: rank=\d+)?) pid=(?P<pid>\d+)\)")


def _read_faulthandler(lines: Sequence[str], context: Context, draft: Draft) -> None:
    found: list[ThreadStack] = []
    frames: list[Frame] = []
    names: list[str] = []

    def end() -> None:
        if frames and names:
            main = any(f.name == "<module>" for f in frames[-1:]) and not any("threading.py" in f.file for f in frames)
            found.append(ThreadStack(name="MainThread" if main else names[-1], frames=tuple(frames)))
        frames.clear()

    prefix = next((m for line in lines if (m := _PREFIX.search(line))), None)
    pid = int(prefix["pid"]) if prefix is not None else context.pid
    # vLLM sets the title of a process and the prefix of its lines from one name.
    title = f"VLLM::{prefix['label']}" if prefix is not None else ""
    for line in lines:
        head, frame = _FAULT.match(line), _FAULT_FRAME.match(line)
        if head is not None:
            end()
            names.append(head["name"] or head[1])
        elif frame is not None:
            frames.append(Frame(name=frame["name"], file=short(frame["file"]), line=int(frame["line"])))
    end()
    if found:
        record(draft, context, pid, found, title)


def _opens_py_spy(line: str, _context: Context) -> bool:
    if not line.lstrip().startswith(("Process ", "Thread ")):
        return False
    return (_PROCESS.match(line) or _THREAD.match(line)) is not None


def _goes_on_pystack(line: str, _context: Context) -> bool:
    return not line.strip() or line.startswith((" ", "\t")) or _PYSTACK.match(line) is not None


def _goes_on_fault(line: str, _context: Context) -> bool:
    if not line.strip() or line.strip() == "...":
        return True
    return (_FAULT.match(line) or _FAULT_FRAME.match(line)) is not None


def _opens_fault(line: str, _context: Context) -> bool:
    return "most recent call first" in line and _FAULT.match(line) is not None


def _reader(context: Context, draft: Draft) -> Reader:
    return _PySpy(context, draft)


FORMATS = (
    Format(name="py-spy dump", opens=_opens_py_spy, reader=_reader, names=("stack", "pyspy", "py-spy")),
    block("pystack", lambda line, _: _PYSTACK.match(line) is not None, _goes_on_pystack, _read_pystack),
    block("faulthandler", _opens_fault, _goes_on_fault, _read_faulthandler),
)

"""Process tables: ps in its usual forms (aux, -ef, -eo ..., forest, with threads), top and docker top."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vllmdiag.bundle.draft import Draft

from .format import Context, Format, Reader
from .host import read_head

_COLUMNS = {
    "USER": "user", "UID": "user", "EUSER": "user", "RUSER": "user",
    "PID": "pid", "TGID": "pid", "PPID": "ppid", "PGID": "pgid", "PGRP": "pgid", "SID": "sid", "SESS": "sid",
    "TID": "tid", "LWP": "tid", "SPID": "tid",
    "S": "stat", "STAT": "stat", "STATE": "stat",
    "ELAPSED": "elapsed", "ETIME": "elapsed", "ETIMES": "elapsed",
    "TIME": "time", "TIME+": "time", "CPUTIME": "time",
    "RSS": "rss", "RES": "rss", "RSZ": "rss", "WCHAN": "wchan", "%CPU": "cpu", "PCPU": "cpu",
    "COMMAND": "command", "CMD": "command", "ARGS": "command", "COMM": "comm", "UCMD": "comm", "NAME": "comm",
    "STARTED": "started", "LSTART": "started",
}  # fmt: skip
"""Heading of a column -> what it is; other columns are passed over."""
_PASSED_OVER = (
    "F C PRI NI ADDR SZ VSZ VIRT SHR TTY TT STIME START %MEM PMEM PSR CLS CP NLWP THCNT PR RTPRIO POL MINFL MAJFL FLAGS"
    " LABEL CGROUP NS UNIT MACHINE CGNAME NUMA BLOCKED PENDING IGNORED CAUGHT SIZE DRS TRS LIM PSS USS"
)
_OTHERS = frozenset(_PASSED_OVER.split())
_AUX = re.compile(
    r"^\S+\s+\d+\s+\d+(?:\.\d+)?\s+\d+(?:\.\d+)?\s+\d+\s+\d+\s+\S+\s+[RSDTtZIX][sl<NL+W]*\s+\S+\s+\d+:\d+\s+\S"
)
_EF = re.compile(
    r"^\S+\s+\d+\s+\d+\s+\d+\s+(?:\d\d:\d\d|[A-Z][a-z]{2}\s?\d\d|\d{4})\s+\S+\s+(?:\d+-)?\d\d:\d\d:\d\d\s+\S"
)
_HEADS = {
    "aux": ["USER", "PID", "%CPU", "%MEM", "VSZ", "RSS", "TTY", "STAT", "START", "TIME", "COMMAND"],
    "ef": ["UID", "PID", "PPID", "C", "STIME", "TTY", "TIME", "CMD"],
}
_FOREST = re.compile(r"^(?P<bars>[ |]*(?:\\_|`-|├─|└─)\s)")
_WEEKDAY = re.compile(r"^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)$")
_TOP = re.compile(r"^(?:top - |Tasks:|Threads:|%Cpu\(s\)|(?:KiB|MiB|GiB) (?:Mem|Swap))")
_DEFUNCT = re.compile(r"^\[?(?P<comm>[^\]]*?)\]?\s*<defunct>$")


@dataclass
class _Row:
    """One line of a table, by meaning of the columns."""

    fields: dict[str, str]
    command: str
    """What stands in the last column, with the lines of a forest cut off."""
    depth: int
    """Width of the lines of a forest before the command; 0 for a root, and outside of a forest."""


class _Table(Reader):
    """The rows under one heading."""

    def __init__(self, context: Context, draft: Draft) -> None:
        self._context, self._draft = context, draft
        self._head: list[str] = []
        self._above: list[tuple[int, int]] = []
        self._threads = "top -H" in context.command or " -H" in context.command.partition("top")[2]

    def take(self, line: str) -> bool:
        if _TOP.match(line):
            read_head(line, self._draft)
            self._threads = self._threads or line.startswith("Threads:")
            return True
        head = heading(line)
        if head:
            self._head, self._above = head, []
            return True
        if not self._head or not _fits(line, self._head):
            self._head = next(
                (_HEADS[form] for form, rule in (("aux", _AUX), ("ef", _EF)) if rule.match(line)), self._head
            )
        row = _row(line, self._head) if self._head else None
        if row is not None:
            self._read(row)
            return True
        return not line.strip()

    def _read(self, row: _Row) -> None:
        fields = row.fields
        pid = int(fields["pid"]) if "pid" in fields else None
        tid = int(fields["tid"]) if "tid" in fields else None
        if self._threads and tid is None:
            pid, tid = self._context.pid, pid
        if pid is None:
            pid = self._context.pid
        if pid is None:
            return
        if tid is not None:
            self._thread(pid, tid, row)
            if tid != pid:
                return
        self._process(pid, row)

    def _process(self, pid: int, row: _Row) -> None:
        fields, draft, context = row.fields, self._draft, self._context
        process = draft.process(pid, context)
        process.in_table = True
        facts: dict[str, Any] = {}
        if "ppid" in fields:
            facts["ppid"] = draft.pid(int(fields["ppid"]), context) if fields["ppid"] != "0" else 0
        else:
            facts["ppid"] = self._parent(process.pid, row.depth)
        for name in ("pgid", "sid"):
            if fields.get(name, "").isdigit():
                facts[name] = int(fields[name])
        if fields.get("user", "").isdigit():
            facts["uid"] = int(fields["user"])
        comm = fields.get("comm", "")
        facts.update(_command(row.command, comm, is_args=not self._only_names()))
        if (age := seconds(fields.get("elapsed", ""))) is not None:
            facts["age_s"] = age
        if (wchan := fields.get("wchan", "")) not in ("", "-", "0", "?"):
            facts["wchan"] = wchan
        process.facts.update({name: value for name, value in facts.items() if value is not None})
        sample: dict[str, Any] = {}
        if stat := fields.get("stat", ""):
            sample["state"] = stat[0]
        if (used := seconds(fields.get("time", ""))) is not None:
            sample["utime"] = used
        if fields.get("rss", "").isdigit():
            sample["rss"] = int(fields["rss"]) * 1024
        if sample:
            process.sample(context.look, **sample)

    def _only_names(self) -> bool:
        """The last column holds the 15 characters of a name, not the command line."""
        return _COLUMNS.get(self._head[-1], "") == "comm" or "RES" in self._head

    def _parent(self, pid: int, depth: int) -> int | None:
        """In a forest the parent is the last row above that begins further left; None for a root."""
        while self._above and self._above[-1][0] >= depth:
            self._above.pop()
        parent = self._above[-1][1] if self._above else None
        self._above.append((depth, pid))
        return parent

    def _thread(self, pid: int, tid: int, row: _Row) -> None:
        fields, look = row.fields, self._context.look
        process = self._draft.process(pid, self._context)
        facts: dict[str, Any] = {}
        name = fields.get("comm") or row.command.partition(" ")[0]
        if name:
            facts["name"] = name[:_COMM]
        if (wchan := fields.get("wchan", "")) not in ("", "-", "0"):
            facts["wchan"] = wchan
        state = fields.get("stat", "")[:1]
        if state:
            facts["state"] = state
        used = seconds(fields.get("time", ""))
        if used is not None:
            facts["utime"] = used
        process.thread(tid, look, **facts)
        share = _number(fields.get("cpu", ""))
        if share is not None and state and (used is None or self._threads):
            # top counts over an interval of its own: written as what the thread used between two looks of that length.
            apart = self._draft.apart_s or _INTERVAL_S
            process.thread(tid, look, **{**facts, "utime": 0.0})
            process.thread(tid, look + 1, **{**facts, "utime": share / 100 * apart})


_INTERVAL_S = 10.0
_COMM = 15
"""Characters that the kernel keeps of a name."""


def _command(command: str, comm: str, is_args: bool) -> dict[str, Any]:
    """Command line and comm, as /proc would give them."""
    dead = _DEFUNCT.match(command)
    if dead is not None:
        return {"cmdline": (), "comm": dead["comm"] or comm}
    if command.startswith("[") and command.endswith("]"):
        return {"cmdline": (), "comm": comm or command[1:-1]}
    if not command:
        return {"comm": comm or None}
    first = command.split(" ", maxsplit=1)[0].rpartition("/")[2]
    if not is_args or ("::" in command and len(command) == _COMM and " " not in command):
        return {"comm": command[:_COMM]}
    return {"cmdline": (command,), "comm": comm or first[:_COMM]}


def heading(line: str) -> list[str]:
    """The columns of a heading of ps or top; empty where the line is none."""
    words = line.split()
    if len(words) < 3 or not ({"PID", "TID", "LWP", "SPID"} & set(words)):
        return []
    known = sum(word in _COLUMNS or word in _OTHERS for word in words)
    commands = {"command", "comm"} & {_COLUMNS.get(word, "") for word in words}
    return words if known >= len(words) - 1 and commands and words[0] != "COMMAND" else []


def _bare(line: str) -> list[str]:
    """The columns of a row whose heading was lost in a grep, where its form tells them."""
    return next((_HEADS[form] for form, rule in (("aux", _AUX), ("ef", _EF)) if rule.match(line)), [])


def _fits(line: str, head: list[str]) -> bool:
    return _row(line, head) is not None


def _row(line: str, head: list[str]) -> _Row | None:
    """A line by the columns of the heading; None where it does not fit."""
    rest = line.replace("\t", " ")
    fields: dict[str, str] = {}
    for word in head[:-1]:
        value, _, rest = rest.lstrip().partition(" ")
        kind = _COLUMNS.get(word, "")
        if kind == "started" and _WEEKDAY.match(value):
            rest = " " + (rest.split(None, 4)[4:] or [""])[0]
        if kind in ("pid", "tid", "ppid") and not value.isdigit():
            return None
        if kind == "stat" and not re.match(r"[RSDTtZIXW]", value):
            return None
        if kind == "command":
            kind = "comm"
        if kind:
            fields[kind] = value
    forest = _FOREST.match(rest)
    command = (rest[len(forest["bars"]) :] if forest is not None else rest).strip()
    if not command and "comm" not in fields:
        return None
    return _Row(fields=fields, command=command, depth=len(forest["bars"]) if forest is not None else 0)


def seconds(text: str) -> float | None:
    """``[[dd-]hh:]mm:ss``, ``1:23.45`` or plain seconds; None where it is none of them."""
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        return float(text)
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (float(group or 0) for group in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + rest


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _opens(line: str, _context: Context) -> bool:
    if ("PID" in line or "ID " in line or "LWP" in line) and heading(line):
        return True
    return bool(_TOP.match(line) or (":" in line and _bare(line)))


def _reader(context: Context, draft: Draft) -> Reader:
    return _Table(context, draft)


FORMATS = (Format(name="process table", opens=_opens, reader=_reader, names=("ps", "top", "threads")),)

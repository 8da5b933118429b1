"""What stands in front of the words of a log line: who prints it, when, from where.

vLLM's own prefixes since 0.6, and what Ray, uvicorn, NCCL, glog, containers, journald, launchers and JSON loggers put
around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RFC3339 = r"(?P<{0}>\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
_LABEL = re.compile(
    r"\((?P<label>[A-Za-z][\w.:-]*(?: rank=\d+| [A-Z]+\d+)?) pid=(?P<pid>\d+)(?:, ip=(?P<node>[^)]*))?\) ?"
)
_STAMP = re.compile(rf"\[?{_RFC3339.format('time')}\]? +(?:std(?:out|err) [FP] )?")  # kubelet, docker logs -t, CRI
_BRACKETS = (
    re.compile(r"\[pod/(?P<node>[^/\]]+)(?:/[^\]]*)?\] "),  # kubectl logs --prefix
    re.compile(r"\[\d+,(?P<rank>\d+)\]<\w+>: ?"),  # mpirun --tag-output
    re.compile(r"\[(?P<node>[A-Za-z][\w.-]*)\] (?=\([A-Za-z][\w.: =-]* pid=\d)"),  # the machine, by hand or by pssh
    re.compile(r"\[(?:default|rank)_?(?P<rank>\d+)\]:? ?"),  # torch, torchrun
    _STAMP,
)
_WORDS_BEFORE = (
    re.compile(r"(?P<node>[\w.-]+) +\| "),  # docker compose
    re.compile(
        r"(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?P<node>[\w.-]+) [\w./@:-]+(?:\[\d+\])?: "
    ),  # journald
)
"""What stands before vLLM's own prefix. Each may come once or several times, in any order; of two labels the inner one
is whose line it is."""


def _outer(line: str, at: int) -> re.Match[str] | None:
    first = line[at : at + 1]
    if first == "(":
        return _LABEL.match(line, at)
    patterns = _BRACKETS if first == "[" else (_STAMP,) if first.isdigit() else _WORDS_BEFORE
    return next((found for pattern in patterns if (found := pattern.match(line, at))), None)


_LEVEL = "DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL"
_VLLM = re.compile(
    rf"(?P<level>{_LEVEL})(?: (?P<time>(?:\d{{4}}-)?\d\d-\d\d \d\d:\d\d:\d\d))?"
    r" (?:\[(?P<source>[\w./-]+:\d+)\]|(?P<old>[\w./-]+:\d+)\]) ?"
)
_PLAIN = re.compile(
    rf"(?:- )?(?P<level>{_LEVEL})(?::\s*|(?: -)? )(?:(?P<time>(?:\d{{4}}-)?\d\d-\d\d \d\d:\d\d:\d\d) )?"
)
_GLOG = re.compile(
    r"\[?(?P<level>[IWEF])(?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)[.\d]*(?: +(?P<pid>\d+))?"
    r" (?P<source>[\w./-]+:\d+)\] ?"
)
_NCCL = re.compile(r"(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<rank>\d+)\] (?=[\w/.]|NCCL)")
_WORDS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}
_DATE = re.compile(r"(?:\d{4}-)?(?P<month>\d\d)-(?P<day>\d\d)[T ](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d+)?)")
_SYSLOG = re.compile(r"(?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)")
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]

_JSON_TEXT = ("log", "message", "msg", "text", "event", "MESSAGE")
_JSON_TRACE = ("exc_info", "exception", "stack_trace", "exc_text", "traceback")
_JSON_TIME = ("time", "timestamp", "@timestamp", "ts", "asctime")
_JSON_LEVEL = ("level", "levelname", "severity", "log.level")


class Said(msgspec.Struct, frozen=True):
    """One line of a log, taken apart."""

    text: str
    """The words themselves."""
    level: str = ""
    time: str = ""
    at: float | None = None
    """Seconds within a year of months of 31 days: good to compare, not to tell a date."""
    outer_at: float | None = None
    """The same by a time that a container runtime or journald has put in front."""
    label: str = ""
    pid: int | None = None
    rank: int | None = None
    node: str = ""
    source: str = ""


def said(line: str) -> Iterator[Said]:
    """A line taken apart; a JSON record may hold several lines (a traceback).

    Never raises: what is not understood stays in ``text``.
    """
    line = _ANSI.sub("", line).rstrip("\r\n")
    record = _record(line)
    if record is None:
        yield _taken_apart(line)
        return
    outer = _seconds(_first(record, _JSON_TIME))
    level = _first(record, _JSON_LEVEL).upper()
    pid = record.get("pid", record.get("process"))
    text = "\n".join(part for part in (_first(record, _JSON_TEXT), _first(record, _JSON_TRACE)) if part)
    for part in text.splitlines():
        found = _taken_apart(part)
        yield msgspec.structs.replace(
            found,
            level=found.level or level,
            time=found.time or _first(record, _JSON_TIME),
            at=found.at if found.at is not None else outer,
            outer_at=outer,
            pid=found.pid if found.pid is not None else pid if isinstance(pid, int) else None,
            label=found.label or (str(name) if (name := record.get("processName")) and name != "MainProcess" else ""),
        )


def _record(line: str) -> dict[str, Any] | None:
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and any(key in found for key in _JSON_TEXT) else None


def _first(record: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        value = record.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _taken_apart(line: str) -> Said:
    facts: dict[str, str] = {}
    outer_time = ""
    at = 0
    while found := _outer(line, at):
        groups = {name: value for name, value in found.groupdict().items() if value}
        outer_time = outer_time or groups.pop("time", "")
        facts |= groups
        at = found.end()
    rest = line[at:]
    head = _VLLM.match(rest) or _PLAIN.match(rest)
    level, time, source = "", "", ""
    if head is not None:
        level, time = head["level"], head["time"] or ""
        source = (head.groupdict().get("source") or head.groupdict().get("old") or "").rpartition("/")[2]
        rest = rest[head.end() :]
    elif glog := _GLOG.match(rest):
        level, source = _WORDS[glog["level"]], glog["source"].rpartition("/")[2]
        time = f"{glog['month']:0>2}-{glog['day']} {glog['clock']}"
        rest = rest[glog.end() :]
    elif nccl := _NCCL.match(rest):
        facts |= {name: value for name, value in nccl.groupdict().items() if value}
        rest = rest[nccl.end() :]
    return Said(
        text=rest,
        level=level,
        time=time or outer_time,
        at=_seconds(time),
        outer_at=_seconds(outer_time),
        label=facts.get("label", ""),
        pid=int(facts["pid"]) if "pid" in facts else None,
        rank=_rank(facts),
        node=facts.get("node", ""),
        source=source,
    )


def _rank(facts: dict[str, str]) -> int | None:
    if "rank" in facts:
        return int(facts["rank"])
    found = re.search(r"rank=(\d+)$", facts.get("label", ""))
    return int(found[1]) if found else None


def _seconds(time: str) -> float | None:
    if not time:
        return None
    found = _DATE.search(time)
    if found is not None:
        month = int(found["month"])
    elif (found := _SYSLOG.search(time)) is not None and found["month"] in _MONTHS:
        month = 1 + _MONTHS.index(found["month"])
    else:
        return None
    days = month * 31 + int(found["day"])
    clock = int(found["h"]) * 3600 + int(found["m"]) * 60 + float(found["s"].replace(",", "."))
    return days * 86400.0 + clock


_SURE = re.compile(rf"\([A-Za-z][\w.: =-]* pid=\d+|(?:{_LEVEL})(?::? +| \d\d-)|\[?[IWEF]\d{{3,4}} \d\d:\d\d:\d\d")


def begins_as_log(line: str) -> bool:
    """The line has a prefix of a log, whatever else stands before it. Made for speed: most lines of a log are sure."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    if _SURE.match(line):
        return True
    if line.startswith("{"):
        return _record(line) is not None
    part = _taken_apart(line)
    return bool(part.level or part.label or part.source or (part.node and part.pid))

"""Control groups as text: files of /sys/fs/cgroup, with their names in front or after the command that read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllmdiag.bundle.draft import Draft

from .format import Context, block

_FILES = (
    "pids.max pids.current pids.events pids.peak memory.max memory.high memory.current memory.peak memory.events"
    " memory.limit_in_bytes memory.usage_in_bytes memory.oom_control memory.swap.max memory.stat memory.failcnt"
    " memory.max_usage_in_bytes cpu.max cpu.stat cgroup.events cgroup.freeze cgroup.procs freezer.state cpuset.cpus"
)
_NAMES = "|".join(re.escape(name) for name in _FILES.split())
_LINE = re.compile(rf"^\s*(?:/\S*/)?(?P<file>{_NAMES})(?:\s*[:=]?\s+|:)(?P<rest>\S.*?)\s*$")
_KEYED = re.compile(
    r"^\s*(?P<key>oom_kill|oom|oom_group_kill|low|high|max|nr_throttled|nr_periods|throttled_usec|throttled_time|frozen"
    r"|populated|shmem|total_shmem|under_oom|oom_kill_disable)\s+(?P<value>\d+)\s*$"
)
_BARE = re.compile(r"^\s*(?:max|\d+|THAWED|FROZEN|FREEZING)\s*$")
_IN_HEADER = re.compile(rf"(?:^|[/\s])({_NAMES})(?=\s|$)")
_MEMBERSHIP = re.compile(r"^\s*(?P<id>\d+):(?P<controllers>[\w,=]*):(?P<path>/\S*)\s*$")
_UNLIMITED = 1 << 60


def _opens(line: str, context: Context) -> bool:
    if _LINE.match(line) or _MEMBERSHIP.match(line):
        return True
    in_header = _IN_HEADER.search(context.header) is not None
    return in_header and (_BARE.match(line) or _KEYED.match(line)) is not None


def _goes_on(line: str, context: Context) -> bool:
    if _BARE.match(line) and len(_IN_HEADER.findall(context.header)) > 1:
        return True
    return (_LINE.match(line) or _KEYED.match(line) or _MEMBERSHIP.match(line)) is not None


def _read(lines: Sequence[str], context: Context, draft: Draft) -> None:
    asked = iter(_IN_HEADER.findall(context.header))
    file = next(asked, "")
    facts: dict[str, Any] = {}
    for line in lines:
        member = _MEMBERSHIP.match(line)
        named = _LINE.match(line)
        keyed = _KEYED.match(line)
        if member is not None:
            if not member["controllers"] or "memory" in member["controllers"]:
                facts["path"] = member["path"]
                facts["version"] = 1 if member["controllers"] else 2
        elif named is not None:
            file = named["file"]
            _fact(facts, file, named["rest"])
        elif keyed is not None and file:
            _fact(facts, file, f"{keyed['key']} {keyed['value']}")
        elif _BARE.match(line) and file:
            _fact(facts, file, line.strip())
            file = next(asked, file)
    if facts:
        draft.subject(context).cgroup.update(facts)


def _fact(facts: dict[str, Any], file: str, text: str) -> None:
    """One file, or one key of it, as a field of `Cgroup`."""
    words = text.split()
    number = int(words[-1]) if words and words[-1].isdigit() else None
    plain = {
        "pids.max": "pids_max", "pids.current": "pids_current", "memory.max": "memory_max",
        "memory.limit_in_bytes": "memory_max", "memory.current": "memory_current",
        "memory.usage_in_bytes": "memory_current",
    }  # fmt: skip
    keyed = {
        ("pids.events", "max"): "pids_refused", ("memory.events", "oom_kill"): "oom_kill",
        ("memory.oom_control", "oom_kill"): "oom_kill", ("cpu.stat", "nr_throttled"): "nr_throttled",
        ("memory.stat", "shmem"): "shmem", ("memory.stat", "total_shmem"): "shmem",
    }  # fmt: skip
    if file in plain:
        facts[plain[file]] = number if number is not None and number < _UNLIMITED else None
    elif file == "freezer.state":
        facts["frozen"] = text.strip() in ("FROZEN", "FREEZING")
    elif file == "cgroup.freeze":
        facts["frozen"] = number == 1
    for key, value in zip(words[0::2], words[1::2], strict=False):
        if not value.isdigit():
            continue
        if (file, key) in keyed:
            facts[keyed[file, key]] = int(value)
        elif (file, key) == ("cgroup.events", "frozen"):
            facts["frozen"] = value == "1"
        elif (file, key) == ("cpu.stat", "throttled_usec"):
            facts["throttled_s"] = int(value) / 1e6
        elif (file, key) == ("cpu.stat", "throttled_time"):
            facts["throttled_s"] = int(value) / 1e9


FORMATS = (block("control group", _opens, _goes_on, _read, names=("cgroup",)),)

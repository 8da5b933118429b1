"""How busy the machine is: uptime, loadavg, stat (twice) and pressure of /proc, nproc, mpstat, the head of top."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft

from .format import Context, block

LOAD = re.compile(r"load averages?: +(?P<load>[\d.]+)")
_LOADAVG = re.compile(r"^(?P<load>\d+\.\d\d) \d+\.\d\d \d+\.\d\d \d+/\d+ \d+$")
_KERNEL = re.compile(r"%Cpu\(s\):.*?(?P<kernel>[\d.]+)\s*sy\b")
_PRESSURE = re.compile(r"^(?P<who>some|full) avg10=(?P<share>[\d.]+) avg60=")
_TICKS = re.compile(r"^cpu +(?P<ticks>\d+(?: \d+){3,})$")
_NUMBER = re.compile(r"^\d{1,5}$")
_CPUS = re.compile(r"^(?:CPU\(s\):\s+|.*?\((?P<mpstat>\d+) CPU\)$)(?P<lscpu>\d+)?")


def read_head(line: str, draft: Draft) -> None:
    """A line of the head of top, or of uptime."""
    if found := LOAD.search(line):
        draft.node["load1"] = float(found["load"])
    if found := _KERNEL.search(line):
        draft.node["kernel_share"] = float(found["kernel"]) / 100


def _read(lines: Sequence[str], context: Context, draft: Draft) -> None:
    ticks = [[int(n) for n in found["ticks"].split()] for line in lines if (found := _TICKS.match(line))]
    if len(ticks) > 1 and (spent := sum(ticks[-1][:8]) - sum(ticks[0][:8])) > 0:  # guests are in user time already
        draft.node["kernel_share"] = (ticks[-1][2] - ticks[0][2]) / spent
    for line in lines:
        read_head(line, draft)
        if found := _LOADAVG.match(line):
            draft.node["load1"] = float(found["load"])
        elif found := _PRESSURE.match(line):
            if found["who"] == "full" or any(word in context.command for word in ("memory", "io")):
                continue
            draft.node["pressure_cpu"] = float(found["share"]) / 100
        elif found := _CPUS.match(line):
            draft.node["n_cpus"] = int(found["mpstat"] or found["lscpu"])
        elif _NUMBER.match(line):
            draft.node["n_cpus"] = int(line)


def _opens(line: str, context: Context) -> bool:
    if _NUMBER.match(line):
        return context.command.startswith("nproc")
    return any(rule.search(line) for rule in (LOAD, _LOADAVG, _KERNEL, _PRESSURE, _CPUS, _TICKS))


FORMATS = (block("load of the host", _opens, _opens, _read, names=("uptime", "loadavg", "top", "nproc", "host")),)

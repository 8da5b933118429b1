"""Who holds memory of a GPU: `nvidia-smi --query-compute-apps` and the list below the table of nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.gpu import DeviceProcess

from .format import Context, block

_QUERY = re.compile(r"--query-compute-apps[= ](\S+)")
_TITLE = re.compile(r"^\s*(?:[\w.]+(?: \[\w+\])?,\s*)*pid(?:,\s*[\w.]+(?: \[\w+\])?)*\s*$")
_ROW = re.compile(r"^\s*[^#|,][^,]*(?:,[^,]*)+$")
_MEMORY = re.compile(r"used_(?:gpu_)?memory\b")
_MIB = re.compile(r"^\s*(\d+)(?:\s*MiB)?\s*$")
_LISTED = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?:\S+\s+\S+\s+)?(?P<pid>\d+)\s+[CGM+]+\s+\S.*?\s+(?P<used>\d+MiB|N/A)\s*\|\s*$"
)


def _columns(context: Context, line: str = "") -> list[str]:
    found = _QUERY.search(context.header)
    return [part.strip() for part in (found[1] if found is not None else line).split(",")]


def _is_title(line: str) -> bool:
    return _TITLE.match(line) is not None and _MEMORY.search(line) is not None


def _opens(line: str, context: Context) -> bool:
    if _is_title(line):
        return True
    asked = _columns(context)
    return "pid" in asked and len(asked) == line.count(",") + 1 and _ROW.match(line) is not None


def _read(lines: Sequence[str], context: Context, draft: Draft) -> None:
    titled = _is_title(lines[0])
    columns = [part.strip() for part in lines[0].split(",")] if titled else _columns(context)
    for line in lines[1:] if titled else lines:
        cells = [cell.strip() for cell in line.split(",")]
        told = dict(zip(columns, cells, strict=False))
        used = next((value for name, value in told.items() if _MEMORY.match(name)), "")
        if len(cells) == len(columns) and told["pid"].isdigit():
            bus = told.get("gpu_bus_id", told.get("pci.bus_id", ""))
            draft.gpu.user(context.node, None, bus, _user(int(told["pid"]), used, context, draft))


def take_listed(line: str, context: Context, draft: Draft) -> bool:
    """Read a line of the list below the table; says whether it was one."""
    found = _LISTED.match(line)
    if found is not None:
        draft.gpu.user(context.node, int(found["index"]), "", _user(int(found["pid"]), found["used"], context, draft))
    return found is not None


def _user(pid: int, used: str, context: Context, draft: Draft) -> DeviceProcess:
    memory = _MIB.match(used)
    return DeviceProcess(pid=draft.pid(pid, context), memory=int(memory[1]) << 20 if memory is not None else None)


FORMATS = (
    block("nvidia-smi compute apps", _opens, lambda line, _: _ROW.match(line) is not None, _read,
          ("nvidia-smi", "nvidia_smi", "gpu")),
)  # fmt: skip

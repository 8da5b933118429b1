"""Shared memory from outside: df, ls -l, du, fuser and lsof of /dev/shm, and mounts with their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.vllm.layouts import classify_file

from .format import Context, block

SHM = "/dev/shm"

_DF = re.compile(
    r"^\s*(?P<fs>\S+)\s+(?P<size>[\d.]+[KMGTPkB]?i?B?)\s+(?P<used>[\d.]+[KMGTPkB]?i?B?)\s+(?P<free>-?[\d.]+[KMGTPkB]?i?B?)\s+(?P<share>\d+%|-)\s+(?P<at>/\S*)\s*$"
)
_DF_HEAD = re.compile(r"^\s*Filesystem\s+(?:Type\s+)?(?P<unit>\S+)\s+Used\s+Avail")
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}


def _bytes(word: str, unit: int) -> int:
    """A number of df: in blocks of `unit` bytes, or with a unit of its own."""
    found = re.match(r"(-?[\d.]+)([KMGTPkB]?)", word)
    if found is None:
        return 0
    return int(float(found[1]) * (_UNITS[found[2]] if found[2] else unit))


def _read_df(lines: Sequence[str], context: Context, draft: Draft) -> None:
    unit = _block_bytes(context.command)
    for line in lines:
        head = _DF_HEAD.match(line)
        if head is not None:
            unit = _heading_bytes(head["unit"], unit)
            continue
        row = _DF.match(line)
        if row is None or not row["at"].endswith(SHM):
            continue
        size, used = _bytes(row["size"], unit), _bytes(row["used"], unit)
        draft.mount(context, size=size, free=_bytes(row["free"], unit), used=used)


def _block_bytes(command: str) -> int:
    """Bytes of a block, by the options of df: 1 KiB unless it was told another."""
    for rule, size in ((r"-B\s*1\b|--block-size=1\b", 1), (r"-(?:\w*m|BM)\b", 1 << 20), (r"-BG\b", 1 << 30)):
        if re.search(r"\bdf\b.*\s(?:" + rule + ")", command):
            return size
    return 1 << 10


def _heading_bytes(word: str, otherwise: int) -> int:
    found = re.match(r"(\d+)?([KMG]?)B?-blocks|(\d+)-blocks", word)
    if found is None:
        return otherwise
    return int(found[1] or found[3] or 1) * _UNITS[found[2] or ""]


_LS = re.compile(
    r"^\s*(?:(?P<blocks>\d+)\s+)?(?P<mode>-[rwxsStT-]{9})[.+@]?\s+\d+\s+(?P<user>\S+)\s+\S+\s+(?P<size>\d+(?:\.\d+)?[KMGT]?)\s+"
    r"(?P<when>\d{9,10}(?:\.\d+)?|[A-Z][a-z]{2}\s+\d+\s+[\d:]+|\d{4}-\d\d-\d\d\s+\d\d:\d\d(?::\S+)?(?:\s+[+-]\d{4})?)?\s*(?P<name>\S.*)$"
)
_OTHER_ENTRY = re.compile(r"^\s*(?:\d+\s+)?[dlbcps][rwxsStT-]{9}[.+@]?\s|^\s*total \d+|^/dev/shm/?:$")
_DU = re.compile(r"^\s*(?P<size>\d+(?:\.\d+)?[KMGT]?)\s+(?P<path>/dev/shm/\S+)\s*$")


def _is_file(line: str, context: Context) -> bool:
    """A row of ls that is of /dev/shm: a comment or command says so, or the name is one of vLLM's there."""
    found = _LS.match(line)
    if found is None:
        return False
    if SHM in context.header or found["name"].startswith(SHM):
        return True
    name, size = found["name"], found["size"]
    kind = classify_file(name, int(size) if size.isdigit() else -1)
    return kind.what != "unknown"


def _opens_ls(line: str, context: Context) -> bool:
    return _is_file(line, context) or (
        SHM in context.header and "ls" in context.header and _OTHER_ENTRY.match(line) is not None
    )


def _goes_on_ls(line: str, _context: Context) -> bool:
    return _LS.match(line) is not None or _OTHER_ENTRY.match(line) is not None


def _read_ls(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    for line in lines:
        row = _LS.match(line)
        if row is None:
            continue
        size = row["size"]
        when = row["when"] or ""
        draft.file(
            row["name"].removeprefix(SHM + "/"),
            size=_bytes(size, 1),
            resident=int(row["blocks"]) * 1024 if row["blocks"] else None,
            mtime=float(when) if re.fullmatch(r"\d{9,10}(?:\.\d+)?", when) else None,
            uid=0 if row["user"] == "root" else int(row["user"]) if row["user"].isdigit() else None,
        )


def _read_du(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    for line in lines:
        row = _DU.match(line)
        if row is not None:
            draft.file(row["path"].removeprefix(SHM + "/"), resident=_bytes(row["size"], 1 << 10))


_MAPPED = re.compile(
    r"^\s*(?:/dev/shm/)?(?P<name>[\w.-]+)(?P<deleted> \(deleted\))?:?\s+(?:pids?[ =:]*)(?P<pids>\d+(?:[, ]+\d+)*)\s*$"
)
_FUSER = re.compile(r"^\s*/dev/shm/(?P<name>[\w.-]+):\s+(?P<pids>\d+[a-z]*(?:\s+\d+[a-z]*)*)\s*$")
_LSOF = re.compile(
    r"^(?P<comm>\S+)\s+(?P<pid>\d+)\s+(?:\d+\s+\S+\s+)?\S+\s+(?P<fd>mem|DEL|\d+[rwu]?\w*)\s+REG\s+\S+"
    r"\s+(?P<size>\d+)?\s*\d+\s+/dev/shm/(?P<name>\S+)(?P<deleted> \(deleted\))?"
)
_NOBODY = re.compile(r"^\s*(?:/dev/shm/)?(?P<name>[\w.-]+):?\s+(?:pids?[ =:]*)?(?:none|nobody|-|no process)\s*$")


def _opens_mapped(line: str, context: Context) -> bool:
    if _FUSER.match(line) or _LSOF.match(line):
        return True
    told = re.search(r"mapped|held|holder|fuser|lsof|who maps", context.header, re.IGNORECASE) is not None
    return told and (_MAPPED.match(line) or _NOBODY.match(line)) is not None


def _goes_on_mapped(line: str, _context: Context) -> bool:
    return any(rule.match(line) for rule in (_MAPPED, _FUSER, _LSOF, _NOBODY))


def _read_mapped(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        row = _FUSER.match(line) or _LSOF.match(line) or _MAPPED.match(line)
        if row is None:
            continue
        path = f"{SHM}/{row['name']}"
        said = row.groupdict()
        words = said.get("pids") or row["pid"]
        draft.file(path, deleted=bool(said.get("deleted") or said.get("fd") == "DEL") or None)
        for word in re.findall(r"\d+", words):
            pid = draft.pid(int(word), context)
            draft.holder(path, pid, mapped=True)
            draft.process(int(word), context)
    draft.holders_told = True


# -- mounts -----------------------------------------------------------------------------------------------------------

_MOUNTINFO = re.compile(
    r"^\s*\d+ \d+ \d+:\d+ \S+ (?P<at>\S+) (?P<flags>\S+) .*?- (?P<kind>\S+) (?P<device>\S+) (?P<options>\S+)\s*$"
)
_MOUNTS = re.compile(
    r"^\s*(?P<device>\S+) (?:on )?(?P<at>/\S*) (?:type )?(?P<kind>[a-z][\w.]{1,15}) "
    r"\(?(?P<options>r[wo]\b[\w,=.:/%+-]*)\)?(?: \d \d)?\s*$"
)
_SIZE = re.compile(r"\bsize=(\d+)([kKmMgG%]?)")
_OWN = re.compile(r"/proc/self/|\bshell\b|another container|other container", re.IGNORECASE)


def _is_mount(line: str, _context: Context) -> bool:
    return (_MOUNTINFO.match(line) or _MOUNTS.match(line)) is not None


def _read_mounts(lines: Sequence[str], context: Context, draft: Draft) -> None:
    if _OWN.search(context.header):
        return  # what the shell sees is not what the server sees
    for line in lines:
        row = _MOUNTINFO.match(line) or _MOUNTS.match(line)
        if row is None:
            continue
        if row["at"] == SHM or row["at"].endswith(SHM):
            size = _SIZE.search(row["options"])
            if size is not None and size[2] != "%":
                total = int(size[1]) * _UNITS[size[2].upper()]
                draft.mount(context, size=total)


FORMATS = (
    block(
        "df",
        lambda line, _: (_DF_HEAD.match(line) or _DF.match(line)) is not None,
        lambda line, _: (_DF_HEAD.match(line) or _DF.match(line)) is not None,
        _read_df,
        names=("df", "shm"),
    ),
    block("holders of shared memory", _opens_mapped, _goes_on_mapped, _read_mapped),
    block("ls of /dev/shm", _opens_ls, _goes_on_ls, _read_ls, names=("shm", "ls")),
    block(
        "du of /dev/shm",
        lambda line, _: _DU.match(line) is not None,
        lambda line, _: _DU.match(line) is not None,
        _read_du,
    ),
    block("mounts", _is_mount, _is_mount, _read_mounts, names=("mount",)),
)

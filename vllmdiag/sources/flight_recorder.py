"""Dumps of torch's flight recorder that exist: found, read without executing anything in them, cut to what compares.

torch writes one file a rank when its watchdog fires, or when it is asked for one (`vllmdiag.acts.flight_recorder`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from vllmdiag.model.base import Missing
from vllmdiag.model.gpu import FlightEntry, FlightGroup, FlightRecord
from vllmdiag.model.process import Process
from vllmdiag.vllm.gpu import gpu

from . import deadline, procfs
from .plain_pickle import loads

MAX_BYTES = 64 << 20
_KEPT_ENTRIES = 64
"""Of each group: ranks that are further apart than this are told apart by their last numbers alone."""
_MAX_SHAPES = 64
_MAX_RANKS = 4096
_SLACK_S = 2.0
_READ_S = 2.0


def records(
    processes: Sequence[Process], environments: Sequence[dict[str, str]], root: str = "/"
) -> tuple[list[FlightRecord], list[Missing]]:
    """The dumps that these processes have written since they started, by rank.

    Args:
        processes: workers, each with a file system of its own.
        environments: of the instance: they may say where dumps are written.
        root: where /proc is.
    """
    found: list[FlightRecord] = []
    holes: list[Missing] = []
    files = list(_files(processes, environments, root))
    paths = [path for path, _, _ in files]
    for (path, rank, age), data in zip(files, deadline.each(_read, paths, timeout_s=_READ_S), strict=True):
        shown = re.sub(r"^.*/proc/\d+/root", "", path)
        if isinstance(data, OSError):
            holes.append(procfs.missing(f"flight recorder dump {shown}", data, hint="run as the user of the server"))
            continue
        try:
            found.append(parse(data, rank, shown, age))
        except ValueError as error:
            why = f"it is no dump of plain values, and nothing of it was executed: {error}"
            holes.append(Missing(what=f"flight recorder dump {shown}", why=why, next=f"ls -l {shown}"))
    return sorted(found, key=lambda record: (record.rank, record.age_s or 0.0)), holes


def parse(data: bytes, rank: int, path: str = "", age_s: float | None = None) -> FlightRecord:
    """One dump, pickle or JSON.

    Raises:
        ValueError: it is neither, or no dump.
    """
    try:
        dump = _mapping(json.loads(data) if data[:1] == b"{" else loads(data))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    entries = dump.get("entries")
    if not isinstance(entries, list):
        raise ValueError("no entries in it")  # noqa: TRY004  a wrong file, not a wrong argument
    grouped: dict[str, list[FlightEntry]] = defaultdict(list)
    names: dict[str, tuple[str, str]] = {}
    for raw in entries:
        if not isinstance(raw, dict) or raw.get("is_p2p"):
            continue
        name, description = (*_words(raw.get("process_group")), "", "")[:2]
        pg = str(raw.get("pg_id")) if isinstance(raw.get("pg_id"), int) else name
        names[pg] = (name, description)
        grouped[pg].append(_entry(raw))
    status, members = _mapping(dump.get("pg_status")), _members(_mapping(dump.get("pg_config")))
    return FlightRecord(
        rank=rank,
        path=path,
        age_s=age_s,
        version=str(dump.get("version"))[:16] if isinstance(dump.get("version"), str) else "",
        groups=tuple(
            FlightGroup(
                name=names[pg][0],
                description=names[pg][1],
                ranks=members.get(names[pg], ()),
                enqueued=_number(_mapping(status.get(pg)).get("last_enqueued_collective")),
                completed=_number(_mapping(status.get(pg)).get("last_completed_collective")),
                entries=tuple(sorted(entries, key=lambda entry: entry.seq)[-_KEPT_ENTRIES:]),
            )
            for pg, entries in grouped.items()
        ),
    )


def _entry(raw: dict[object, object]) -> FlightEntry:
    seq, name = raw.get("collective_seq_id"), raw.get("profiling_name")
    if not isinstance(seq, int) or not isinstance(name, str):
        raise ValueError("an entry without number or name")  # noqa: TRY004  a broken file, not a wrong argument
    shapes = raw.get("input_sizes")
    return FlightEntry(
        seq=seq,
        op=name.rpartition(":")[2][:64],
        sizes=tuple(_shape(s) for s in shapes[:_MAX_SHAPES]) if isinstance(shapes, list | tuple) else (),
        dtypes=tuple(_words(raw.get("input_dtypes"))),
        retired=raw.get("retired") is True,
    )


def _shape(value: object) -> tuple[int, ...]:
    return tuple(n for n in value[:_MAX_SHAPES] if isinstance(n, int)) if isinstance(value, list | tuple) else ()


def _words(value: object) -> list[str]:
    return [w[:256] for w in value[:_MAX_SHAPES] if isinstance(w, str)] if isinstance(value, list | tuple) else []


def _mapping(value: object) -> dict[object, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _members(configuration: dict[object, object]) -> dict[tuple[str, str], tuple[int, ...]]:
    """(name, description) of a group -> its global ranks, which the dump writes as text: ``[0, 1]``."""
    found = {}
    for one in map(_mapping, configuration.values()):
        name, description, ranks = (one.get(key) for key in ("name", "desc", "ranks"))
        if isinstance(name, str) and isinstance(ranks, str) and (numbers := re.findall(r"\d{1,6}", ranks)):
            key = (name, description if isinstance(description, str) else "")
            found[key] = tuple(int(number) for number in numbers[:_MAX_RANKS])
    return found


# -- where they are --------------------------------------------------------------------------------------------------


def _files(
    processes: Sequence[Process], environments: Sequence[dict[str, str]], root: str
) -> Iterator[tuple[str, int, float]]:
    """Path, rank and age in seconds of each dump, through the file system of the process that wrote it."""
    table = gpu().flight_recorder
    named = [e[name] for e in environments for name in table.stem_variables if name in e]
    stems = tuple(dict.fromkeys(stem for stem in (*named, *table.stems) if stem.startswith("/")))
    seen: set[object] = set()
    now = time.time()
    for process, listed in zip(processes, deadline.each(partial(_list, stems, root), processes), strict=True):
        for path, rank, written, identity in json.loads(listed) if isinstance(listed, bytes) else ():
            age = now - written
            if tuple(identity) in seen or (process.age_s is not None and age > process.age_s + _SLACK_S):
                continue  # workers share a file system; and what an earlier server left says nothing of this one
            seen.add(tuple(identity))
            yield path, rank, round(age, 1)


def _list(stems: tuple[str, ...], root: str, process: Process) -> bytes:
    """In a child: regular files with such a name and a rank, that belong to the user of the process (/tmp is open)."""
    found = []
    for stem in stems:
        directory, prefix = os.path.split(procfs.proc(root, process.pid, "root") + stem)
        for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
            rank = name.removeprefix(prefix).removesuffix(".json")
            if name.startswith(prefix) and rank.isdecimal() and len(rank) <= 6:
                path = os.path.join(directory, name)
                file = os.lstat(path)
                if stat.S_ISREG(file.st_mode) and process.uid in {None, file.st_uid}:
                    found.append((path, int(rank), file.st_mtime, (file.st_dev, file.st_ino)))
    return json.dumps(found).encode()


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO of that name must not hold us
    with open(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB")
        return file.read(MAX_BYTES)

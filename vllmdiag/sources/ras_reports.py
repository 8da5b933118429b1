"""Answers of NCCL RAS into values: the JSON of 2.28.7 and later, the text of 2.24 and later.

Pure. Bytes that are no report end in ValueError, whatever they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from vllmdiag.model.gpu import RasCommunicator, RasRank, RasReport, RasTally
from vllmdiag.vllm.gpu import gpu

ANY_COLLECTIVE = "collectives"
"""Kind of the one count that NCCL 2.24 and 2.25 keep of all of them."""


# -- JSON -------------------------------------------------------------------------------------------------------------


class _Status(msgspec.Struct):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int | None = None
    cuda_dev: int | None = None
    nvml_dev: int | None = None
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[str, int] | None = None


class _Communicator(msgspec.Struct):
    hash: str = ""
    size: int = 0
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Ras(msgspec.Struct):
    timeouts_count: int = 0


class _Document(msgspec.Struct):
    nccl_version: str
    communicators: list[_Communicator] = []
    ras: _Ras = msgspec.field(default_factory=_Ras)


def from_json(body: bytes) -> RasReport:
    """A JSON report.

    Raises:
        ValueError: it is none.
    """
    try:
        document = msgspec.json.decode(body, type=_Document)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    communicators = tuple(_communicator(c) for c in document.communicators)
    missing = [rank for c in communicators for rank in c.missing]
    everyone = {(r.host, r.pid) for c in communicators for r in (*c.ranks, *c.missing)}
    return RasReport(
        format="json",
        nccl_version=document.nccl_version,
        processes=len(everyone) or None,
        communicators=communicators,
        dead=_processes(missing, "dead"),
        silent=_processes(missing, "unresponsive"),
        timeouts=document.ras.timeouts_count,
    )


def _communicator(found: _Communicator) -> RasCommunicator:
    return RasCommunicator(
        hash=found.hash.removeprefix("0x"),
        size=found.size,
        ranks=tuple(_rank(r) for r in found.ranks),
        missing=tuple(_rank(r, _why_missing(r.status)) for r in found.missing_ranks),
    )


def _why_missing(status: _Status) -> str:
    if status.considered_dead:
        return "dead"
    return "unresponsive" if status.unresponsive else "left"


def _rank(found: _Rank, status: str = "") -> RasRank:
    return RasRank(
        rank=found.rank,
        pid=found.pid,
        host=found.host,
        device=found.cuda_dev,
        nvml_device=found.nvml_dev,
        status=status or _status(found.status),
        error=_error(found.status),
        counts=found.collective_counts if not status else None,
    )


def _status(status: _Status) -> str:
    if status.abort_flag:
        return "abort"
    if status.init_state == gpu().ras.in_progress:
        return "init"
    return "finalize" if status.finalize_called or status.destroy_flag else "running"


def _error(status: _Status) -> str:
    ras = gpu().ras
    for number, when in ((status.init_state, "initialisation: "), (status.async_error, "")):
        if number not in {0, ras.in_progress}:
            return when + ras.results.get(number, f"NCCL result {number}")
    return ""


def _processes(ranks: list[RasRank], status: str) -> tuple[RasRank, ...]:
    """The processes of missing ranks, each once."""
    found = {(r.host, r.pid): r for r in ranks if r.status == status}
    return tuple(RasRank(rank=-1, pid=r.pid, host=r.host, device=r.device, status=status) for r in found.values())


# -- text -------------------------------------------------------------------------------------------------------------

_VERSION = re.compile(r"NCCL version (\S+)")
_JOB = re.compile(r"\s*\d+\s+[\d-]+\s+[\d-]+\s+(\d+)\s+\d+\s*")
_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+\d+\s+[\d-]+\s+(\d+)(?:-\d+)?\s+\d+\s+([A-Z]+)\s+[A-Z,]+\s*")
_BLOCK = re.compile(r"(?:#(\d+)-(\d+) \(([0-9a-fA-F.\u2026]+)\) )?(INCOMPLETE|ERROR|MISMATCH|DEAD|TIMEOUT)\s*")
_TOPIC = re.compile(r"\s+Communicator ranks have different (?:(\w+) operation counts|(status))")
_WHO = r"(?: -- GPUs? (?P<gpu>\d+).*? managed by process (?P<pid>\d+) on node (?P<host>\S+))?\s*"
_RANK = re.compile(
    r"\s+Rank (?P<rank>\d+)(?: has status (?P<status>\w+)| has launched up to operation (?P<count>\d+)"
    r"|(?P<none> has not launched any operations)| reported (?P<error>.+?))?" + _WHO
)
_GROUP = re.compile(r"\s+(\d+) ranks? ha(?:ve|s) (?:launched up to operation (\d+)|(not launched any operations))\s*")
_PROCESS = re.compile(r"\s+Process (\d+) on node (\S+?)(?: managing GPUs? (\d+).*)?\s*")
_TIMEOUTS = re.compile(r"\s+Encountered (\d+) communication timeouts?\b.*")
_STATUS_WORDS = {"UNKNOWN": "left", "NOCOMM": "left"}
_LONGEST_LINE = 1000  # the longest real ones have 120; a pattern may take the square of this
_INITIALIZATION = "Initialization error"


@dataclass
class _Named:
    """A communicator that the text gives details of."""

    group: int
    hash: str
    ranks: dict[int, RasRank] = field(default_factory=dict)
    missing: dict[int, RasRank] = field(default_factory=dict)
    tallies: list[RasTally] = field(default_factory=list)


@dataclass
class _Text:
    """The report as far as it has been read."""

    version: str = ""
    processes: int | None = None
    rows: list[tuple[int, int, int, str]] = field(default_factory=list)
    named: dict[str, _Named] = field(default_factory=dict)
    dead: list[RasRank] = field(default_factory=list)
    silent: list[RasRank] = field(default_factory=list)
    timeouts: int = 0
    block: str = ""
    current: _Named | None = None
    topic: str = ""
    tally: RasTally | None = None
    """The last line that told how many ranks stand at a count: ranks that follow it without a count are of these."""

    def take(self, line: str) -> None:
        """One line."""
        if found := _VERSION.match(line):
            self.version = self.version or found[1]
        elif not self.block and (found := _ROW.fullmatch(line)):
            self._row(found)
        elif self.processes is None and not self.block and (found := _JOB.fullmatch(line)):
            self.processes = int(found[1])
        elif found := _BLOCK.fullmatch(line):
            self._open(found)
        elif self.block:
            self._detail(line)

    def _row(self, found: re.Match[str]) -> None:
        group, copies, size, status = found.groups()
        self.rows.append((int(group), int(copies), int(size), status))

    def _open(self, found: re.Match[str]) -> None:
        group, _, name, self.block = found.groups()
        self.topic = ""
        self.tally = None
        self.current = None
        if name is not None:
            self.current = self.named.setdefault(name.lower(), _Named(int(group), name.lower()))

    def _detail(self, line: str) -> None:
        if found := _TIMEOUTS.fullmatch(line):
            self.timeouts += int(found[1])
        elif found := _PROCESS.fullmatch(line):
            self._process(found)
        elif found := _TOPIC.match(line):
            self.topic = "" if found[2] else found[1] if found[1] != "collective" else ANY_COLLECTIVE
        elif line.strip().startswith(_INITIALIZATION):
            self.topic = _INITIALIZATION
        elif self.current is not None and (found := _GROUP.fullmatch(line)):
            count = 0 if found[3] else int(found[2])
            self.tally = RasTally(collective=self.topic, count=count, ranks=int(found[1]))
            self.current.tallies.append(self.tally)
        elif self.current is not None and (found := _RANK.fullmatch(line)):
            self._rank(self.current, found)

    def _process(self, found: re.Match[str]) -> None:
        pid, host, device = found.groups()
        into, status = (self.dead, "dead") if self.block == "DEAD" else (self.silent, "unresponsive")
        into.append(RasRank(rank=-1, pid=int(pid), host=host, device=int(device) if device else None, status=status))

    def _rank(self, communicator: _Named, found: re.Match[str]) -> None:
        number = int(found["rank"])
        known = communicator.ranks.get(number) or communicator.missing.get(number)
        rank = known or RasRank(
            rank=number,
            pid=int(found["pid"]) if found["pid"] else None,
            host=found["host"] or "",
            device=int(found["gpu"]) if found["gpu"] else None,
        )
        if self.block == "INCOMPLETE":
            communicator.missing[number] = msgspec.structs.replace(rank, status="missing")
            return
        if found["status"]:
            rank = msgspec.structs.replace(rank, status=_STATUS_WORDS.get(found["status"], found["status"].lower()))
        elif self.block == "MISMATCH" and self.tally in communicator.tallies and not (found["count"] or found["none"]):
            rank = self._of_tally(communicator, rank)
        elif found["count"] or found["none"]:
            counts = {**(rank.counts or {}), self.topic: int(found["count"] or 0)}
            rank = msgspec.structs.replace(rank, counts=counts)
        elif found["error"]:
            when = "initialisation: " if self.topic == _INITIALIZATION else ""
            rank = msgspec.structs.replace(rank, error=when + found["error"].strip().lower())
        (communicator.missing if rank.status == "left" else communicator.ranks)[number] = rank

    def _of_tally(self, communicator: _Named, rank: RasRank) -> RasRank:
        """One of the ranks that were counted before they were named: it is counted as itself from here on."""
        tally = self.tally
        if tally is None:
            return rank
        at = communicator.tallies.index(tally)
        left = msgspec.structs.replace(tally, ranks=tally.ranks - 1)
        communicator.tallies[at : at + 1] = [left] if left.ranks > 0 else []
        self.tally = left if left.ranks > 0 else None
        return msgspec.structs.replace(rank, counts={**(rank.counts or {}), tally.collective: tally.count})

    def complete(self) -> None:
        """A row for each group that is named below a table which could not be read."""
        known = {group for group, *_ in self.rows}
        for one in self.named.values():
            if one.group not in known:
                size = len({*one.ranks, *one.missing}) + sum(tally.ranks for tally in one.tallies)
                self.rows.append((one.group, 1, size, ""))

    def communicators(self) -> Iterator[RasCommunicator]:
        """Those of the table: first the named ones of a group, then the rest of it as one."""
        fate = {(p.host, p.pid): p.status for p in (*self.silent, *self.dead)}
        for group, copies, size, status in self.rows:
            mine = [n for n in self.named.values() if n.group == group]
            for one in mine:
                yield RasCommunicator(
                    hash=one.hash,
                    size=size,
                    ranks=tuple(one.ranks[r] for r in sorted(one.ranks)),
                    missing=tuple(
                        r
                        if r.status == "left"
                        else msgspec.structs.replace(r, status=fate.get((r.host, r.pid), r.status))
                        for _, r in sorted(one.missing.items())
                    ),
                    tallies=tuple(one.tallies),
                    status=status,
                )
            if copies > len(mine):
                yield RasCommunicator(size=size, status=status, copies=copies - len(mine))


def from_text(body: str, *, pasted: bool = False) -> RasReport:
    """A text report.

    Args:
        body: as the server sent it.
        pasted: by hand: its head may be missing, and columns of its tables.

    Raises:
        ValueError: it is none.
    """
    text = _Text()
    for line in body.splitlines():
        if len(line) <= _LONGEST_LINE:
            text.take(line)
    if not text.version and not (pasted and (text.rows or text.named)):
        raise ValueError("it does not say which NCCL it is of")
    if pasted:
        text.complete()
    return RasReport(
        format="text",
        nccl_version=text.version,
        processes=text.processes,
        communicators=tuple(text.communicators()),
        dead=tuple(text.dead),
        silent=tuple(text.silent),
        timeouts=text.timeouts,
    )

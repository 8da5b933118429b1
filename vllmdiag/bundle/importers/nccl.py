"""What NCCL and torch say of collectives: reports of NCCL RAS, and what the analyser makes of flight recorder dumps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vllmdiag.bundle.draft import APART_S, Draft
from vllmdiag.model.gpu import FlightEntry, FlightGroup, FlightRecord
from vllmdiag.sources import flight_recorder
from vllmdiag.sources.ras_reports import from_json, from_text

from . import documents
from .format import Context, block

# -- NCCL RAS ---------------------------------------------------------------------------------------------------------

_OPENS = re.compile(r"^(?:NCCL version \S+ compiled with CUDA|Job summary\s*$)")
_GOES_ON = re.compile(
    r"^(?:\s|$|=|\(total\)|Job summary|Communicators|Group|Errors|Warnings|INCOMPLETE|DEAD|TIMEOUT|MISMATCH|ERROR"
    r"|CUDA runtime|#\d+-\d+|Collecting|Process|Rank)"
)


def _read_text(lines: Sequence[str], context: Context, draft: Draft) -> None:
    try:
        report = from_text("\n".join(lines), pasted=True)
    except ValueError as error:
        draft.missing(f"NCCL RAS in {context.source}", f"damaged: {error}", "copy it again")
        return
    draft.add("ras", msgspec.structs.replace(report, t=context.look * APART_S))


def _is_ras(value: Any) -> bool:
    return isinstance(value, dict) and "nccl_version" in value and "communicators" in value


def _read_json(value: Any, context: Context, draft: Draft) -> None:
    report = from_json(json.dumps(value).encode())
    draft.add("ras", msgspec.structs.replace(report, t=context.look * APART_S))


# -- the flight recorder ----------------------------------------------------------------------------------------------

_LINE = re.compile(
    r"^\s*pg (?P<group>\S+)(?: \((?P<name>[^)]*)\))? seq(?:uence)?(?: id)?[ =:]*(?P<seq>\d+) op (?P<op>\S+)"
    r"(?:\s+state \w+)?(?:\s+ranks joined: \{(?P<joined>[^}]*)\})?(?:\s+missing ranks: \{(?P<missing>[^}]*)\})?"
)
_NOT_ALL = re.compile(r"Not all ranks joining collective,? (?:sequence number: )?(?P<seq>\d+)")
_DETAIL = re.compile(
    r"^\s*(?P<key>group info|collective|missing ranks|expected ranks|collective state)[:\s]\s*(?P<value>.+)$"
)
_CULPRIT = re.compile(r"[Cc]ulprit rank (?P<rank>\d+)[;,]\s*(?:[Ee]rror type: (?P<type>\w+),?)?\s*(?P<why>.*)")
_ERRORS = re.compile(r"Collective sequence number: (?P<seq>\d+) has errors")
_KINDS = re.compile(r"[Ee]xpected \w[\w ]*: '(?P<wanted>[^']*)'.*?found \w[\w ]*: '(?P<found>[^']*)'")


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text or "")]


def _op(text: str) -> str:
    return text.strip().rpartition(":")[2].strip("'\" ").lstrip("_")


class _Analysis:
    """One collective that ranks did not join in the same way."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.group, self.name, self.op = "0", "", "collective"
        self.joined: list[int] = []
        self.missing: list[int] = []
        self.other: dict[int, str] = {}
        """Rank -> what it entered instead."""

    def detail(self, key: str, value: str) -> None:
        """A line of the analyser under its heading."""
        if key == "group info":
            self.group, _, self.name = value.strip().partition(":")
        elif key == "collective":
            self.op = _op(value)
        elif key == "missing ranks":
            self.missing = _numbers(value)
        elif key == "expected ranks":
            self.joined = [rank for rank in _numbers(value) if rank not in self.missing]

    def records(self) -> list[FlightRecord]:
        """A dump of each rank, as far as the analysis tells of it."""
        members = sorted({*self.joined, *self.missing, *self.other})
        joined = [rank for rank in members if rank not in self.missing]
        if not joined and self.missing:  # the analyser names only who is missing: somebody waits
            joined = [next(rank for rank in range(len(self.missing) + 1) if rank not in self.missing)]
        made = []
        for rank in sorted({*members, *joined}):
            last = self.seq - 1 if rank in self.missing else self.seq
            op = self.other.get(rank, self.op)
            entries = (FlightEntry(seq=self.seq, op=op),) if rank not in self.missing else ()
            group = FlightGroup(
                name=self.group, description=self.name, ranks=tuple(members), enqueued=last, entries=entries
            )
            made.append(FlightRecord(rank=rank, groups=(group,)))
        return made


def _read_analysis(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    found: list[_Analysis] = []
    for line in lines:
        if one := _LINE.match(line):
            analysis = _Analysis(int(one["seq"]))
            analysis.group, analysis.name, analysis.op = one["group"], one["name"] or "", _op(one["op"])
            analysis.joined, analysis.missing = _numbers(one["joined"]), _numbers(one["missing"])
            found.append(analysis)
        elif one := _NOT_ALL.search(line) or _ERRORS.search(line):
            found.append(_Analysis(int(one["seq"])))
        elif found and (one := _CULPRIT.search(line)):
            _culprit(found[-1], one)
        elif found and (one := _DETAIL.match(line)):
            found[-1].detail(one["key"], one["value"])
    records: dict[int, FlightRecord] = {}
    for analysis in found:
        for record in analysis.records():
            known = records.get(record.rank)
            groups = (*(known.groups if known is not None else ()), *record.groups)
            records[record.rank] = msgspec.structs.replace(record, groups=groups)
    draft.add("flight_records", *records.values())


def _culprit(analysis: _Analysis, found: re.Match[str]) -> None:
    kinds = _KINDS.search(found["why"])
    if kinds is not None:
        analysis.op = kinds["wanted"]
    rank = int(found["rank"])
    analysis.other[rank] = kinds["found"] if kinds is not None else (found["type"] or "another one").lower()
    if not analysis.joined:
        analysis.joined = [other for other in range(rank + 2) if other != rank][:2]


def read_dump(data: bytes, context: Context, draft: Draft) -> bool:
    """A dump as torch has written it (a pickle, which is read without running anything in it)."""
    rank = re.search(r"(\d+)$", context.name)
    try:
        record = flight_recorder.parse(data, int(rank[1]) if rank else 0, context.source)
    except ValueError:
        return False
    draft.add("flight_records", record)
    return True


def _never(_line: str, _context: Context) -> bool:
    return False


def _goes_on_analysis(line: str, _context: Context) -> bool:
    patterns = (_LINE, _NOT_ALL, _ERRORS, _CULPRIT, _DETAIL)
    return any(p.search(line) for p in patterns) or re.match(r"^\s*[a-z][a-z ]{2,30}:?\s", line) is not None


documents.SHAPES.append(("NCCL RAS, JSON", _is_ras, _read_json))
FORMATS = (
    block("NCCL RAS", _OPENS.pattern, _GOES_ON.pattern, _read_text, ("ras", "ncclras")),
    block(
        "flight recorder analysis",
        lambda line, _: any(p.search(line) for p in (_LINE, _NOT_ALL, _ERRORS)),
        _goes_on_analysis,
        _read_analysis,
        ("frtrace", "fr_trace"),
    ),
)

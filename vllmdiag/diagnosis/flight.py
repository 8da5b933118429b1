"""Dumps of torch's flight recorder compared: the first collective that not all ranks entered in the same way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllmdiag.model.gpu import FlightEntry, FlightGroup, FlightRecord
from vllmdiag.model.ranks import fold

_EVERYBODY = "default_pg"
"""The group that torch makes first: each rank is a member, also where the dump does not list them."""


@dataclass(frozen=True)
class Disagreement:
    """The first collective of a process group that not all ranks entered in the same way."""

    group: str
    """Name and description."""
    seq: int
    waiting: tuple[int, ...]
    """Ranks that entered it as most did, and wait."""
    not_entered: tuple[int, ...]
    other: dict[int, str]
    """Rank -> what it entered instead, in words, where that differs from what most entered."""
    wanted: str
    """What most entered."""
    no_dump: tuple[int, ...] = ()
    """Members of which there is no dump."""
    undecided: bool = False
    """As many ranks did the one as the other: the lowest rank is then taken as the measure."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks to look at."""
        return self.not_entered or tuple(sorted(self.other)) or self.no_dump


def disagreements(records: Sequence[FlightRecord]) -> tuple[Disagreement, ...]:
    """Compare the newest dump of each rank, group by group."""
    newest: dict[int, FlightRecord] = {}
    for record in records:
        known = newest.get(record.rank)
        if known is None or (record.age_s or 0.0) < (known.age_s or 0.0):
            newest[record.rank] = record
    groups: dict[tuple[str, str], dict[int, FlightGroup]] = defaultdict(dict)
    for rank, record in newest.items():
        for group in record.groups:
            groups[group.name, group.description][rank] = group
    found = (_compare(name, by_rank, set(newest)) for name, by_rank in groups.items())
    return tuple(one for one in found if one is not None)


def _compare(name: tuple[str, str], by_rank: dict[int, FlightGroup], dumped: set[int]) -> Disagreement | None:
    listed = {rank for group in by_rank.values() for rank in group.ranks}
    members = listed or (dumped if name[1] == _EVERYBODY else set(by_rank))
    tables = {rank: {entry.seq: entry for entry in group.entries} for rank, group in by_rank.items()}
    reached = {rank: max((*tables[rank], by_rank[rank].enqueued or 0), default=0) for rank in by_rank}
    # What has finished for one rank may still wait to be retired: the first that does not fit is meant.
    for seq in sorted({seq for table in tables.values() for seq, entry in table.items() if not entry.retired}):
        entered = {rank: table[seq] for rank, table in tables.items() if seq in table}
        not_entered = tuple(sorted(rank for rank in members & dumped if reached.get(rank, 0) < seq))
        found = _judge(name, seq, entered, not_entered, tuple(sorted(members - dumped)))
        if found is not None:
            return found
    return None


def _judge(
    name: tuple[str, str],
    seq: int,
    entered: dict[int, FlightEntry],
    not_entered: tuple[int, ...],
    no_dump: tuple[int, ...],
) -> Disagreement | None:
    kinds = Counter(_in_words(entry) for entry in entered.values())
    # The most are the measure. Of as many, those that wait: who has gone on did something that needed nobody.
    wanted = max(kinds, key=lambda words: (kinds[words], _waiting(words, entered.values()), -_lowest(words, entered)))
    other = {rank: _in_words(entry) for rank, entry in sorted(entered.items()) if _in_words(entry) != wanted}
    if not (not_entered or other or no_dump):
        return None
    return Disagreement(
        group=" ".join(word for word in name if word),
        seq=seq,
        waiting=tuple(sorted(r for r, entry in entered.items() if not entry.retired and r not in other)),
        not_entered=not_entered,
        other=other,
        wanted=wanted,
        no_dump=no_dump,
        undecided=sum(n == kinds[wanted] for n in kinds.values()) > 1,
    )


def _waiting(words: str, entries: Iterable[FlightEntry]) -> int:
    return sum(not entry.retired for entry in entries if _in_words(entry) == words)


def _lowest(words: str, entered: dict[int, FlightEntry]) -> int:
    return min(rank for rank, entry in entered.items() if _in_words(entry) == words)


def _in_words(entry: FlightEntry) -> str:
    shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in entry.sizes)
    return f"{entry.op} of {shapes or 'nothing'} {'/'.join(entry.dtypes)}".strip()


def say(one: Disagreement) -> str:
    """A disagreement in one line."""
    parts = []
    if one.not_entered:
        parts.append(f"rank {fold(one.not_entered)} has not entered it")
    parts += [f"rank {rank} entered {what}" for rank, what in one.other.items()]
    if one.no_dump:
        parts.append(f"there is no dump of rank {fold(one.no_dump)}")
    if one.undecided:
        parts.append("as many did the one as the other")
    waits = f", rank {fold(one.waiting)} waits" if one.waiting else ""
    return f"{one.wanted}{waits}: {'; '.join(parts)}"

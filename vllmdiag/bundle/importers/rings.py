"""Ring dumps: the flags of each slot, with what whoever wrote them down says of the ring and its parties."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.shm import RingClaim

from .format import Context, block

_HEAD = re.compile(r"^\s*ring\s+(?P<name>\S+)\s+(?P<rest>.*\bn_readers?=\d+.*)$", re.IGNORECASE)
_SLOT = re.compile(r"^\s*slot\s+(?P<index>\d+)\s*[:=\[]?\s*(?P<flags>[\d\s,|]+)\]?\s*(?:#.*)?$", re.IGNORECASE)
_FIELD = re.compile(r"(\w+)=(\S+)")
_QUEUES = {
    "request": "broadcast", "broadcast": "broadcast", "rpc": "broadcast", "rpc_broadcast": "broadcast",
    "response": "response", "worker_response": "response", "group": "group", "tp": "group",
}  # fmt: skip
"""Word for the part of a ring -> ours."""


def _read(lines: Sequence[str], context: Context, draft: Draft) -> None:
    claim: RingClaim | None = None
    name = ""
    rows: dict[int, bytes] = {}

    def end() -> None:
        if claim is not None and rows:
            draft.ring(name, claim, _tail(claim, rows), context)

    for line in lines:
        head = _HEAD.match(line)
        slot = _SLOT.match(line)
        if head is not None:
            end()
            claim, name, rows = _claim(head["rest"], context, draft), head["name"], {}
        elif slot is not None:
            flags = [int(word) for word in re.findall(r"\d+", slot["flags"])]
            rows[int(slot["index"])] = bytes(min(flag, 255) for flag in flags)
    end()


def _claim(rest: str, context: Context, draft: Draft) -> RingClaim:
    fields = {key.lower(): value for key, value in _FIELD.findall(rest)}
    writer = fields.get("writer_pid", fields.get("writer", ""))
    readers = fields.get("reader_pids", fields.get("readers", ""))
    return RingClaim(
        queue=_QUEUES.get(fields.get("role", fields.get("queue", "")).lower(), ""),
        n_readers=int(fields.get("n_reader", fields.get("n_readers", "1"))),
        chunks=_number(fields.get("slots", fields.get("chunks", "0"))),
        chunk_bytes=_number(fields.get("chunk", fields.get("chunk_bytes", "0"))),
        writer=draft.pid(int(writer), context) if writer.isdigit() else None,
        readers=tuple(draft.pid(int(word), context) if word.isdigit() else None for word in readers.split(",") if word),
    )


def _number(word: str) -> int:
    return int(word) if word.isdigit() else 0


def _tail(claim: RingClaim, rows: dict[int, bytes]) -> bytes:
    """The flags as they stand at the end of the segment; a slot that was left out counts as read by all."""
    width = 1 + claim.n_readers
    count = max(claim.chunks, max(rows) + 1)
    return b"".join(rows.get(i, b"\1" * width).ljust(width, b"\1")[:width] for i in range(count))


def _goes_on(line: str, _context: Context) -> bool:
    return not line.strip() or _SLOT.match(line) is not None or _HEAD.match(line) is not None


FORMATS = (block("ring dump", lambda line, _: _HEAD.match(line) is not None, _goes_on, _read, names=("ring",)),)

"""The name of the RPC in a slot of the broadcast ring, read without executing anything and without showing an argument.

EngineCore writes the tuple ``(method, args, kwargs, output_rank)`` in every version (vllm/v1/executor/
multiproc_executor.py collective_rpc). A pickle of a tuple of four begins with PROTO, perhaps FRAME, MARK, and then its
first item. Only that item is looked at, and only where it stands exactly there: whatever else the bytes are, nothing
of them comes out.
"""

from __future__ import annotations

import pickletools
import re
from functools import cache

import msgspec

from .tables import load

CALLABLE = "<callable>"
"""Shown for a function sent by value (cloudpickle); its name is inside and stays there."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,80}")
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_NO_VALUE = {"PROTO", "FRAME", "MEMOIZE"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}


class Framing(msgspec.Struct, frozen=True):
    """Where in a slot the pickle stands."""

    pickle_at: int
    length_at: int | None
    """Offset of the length of the pickle (u32, big endian); None where the slot does not tell it."""
    source: str
    since: str | None = None
    until: str | None = None


@cache
def framings() -> tuple[Framing, ...]:
    """Every framing, oldest first."""
    return load("slots", tuple[Framing, ...])


def method_of(slot: bytes) -> tuple[str | None, int, bool]:
    """What a slot says about its message. Only for slots of a broadcast ring: elsewhere the first item is no method.

    Args:
        slot: the first bytes of the slot. 512 are enough for the methods of vLLM itself; the 7 of the header
            give length and overflow.

    Returns:
        (method, length, overflow): the method's name, `CALLABLE`, or None where the slot shows none; bytes of the
        pickle, 0 where unknown; whether the payload went over the socket instead (the slot then holds an older one).
    """
    if slot[:1] == b"\x01":
        return None, 0, True
    framing = _framing(slot)
    if framing is None:
        return None, 0, False
    pickled = slot[framing.pickle_at :]
    if framing.length_at is None:
        length = _framed_length(pickled)
    else:
        length = int.from_bytes(slot[framing.length_at : framing.length_at + 4], "big")
    return _first_item(pickled), length, False


def _framing(slot: bytes) -> Framing | None:
    """Told from the bytes: a pickle begins with PROTO (0x80), and no message has 0x80.. buffers."""
    if slot[:1] != b"\x00" or len(slot) < 3:
        return None
    old, new = framings()
    if slot[old.pickle_at] == 0x80:
        return old
    n_buffers = int.from_bytes(slot[1:3], "big")
    return new if n_buffers and len(slot) >= new.pickle_at else None


def _framed_length(pickled: bytes) -> int:
    """PROTO and FRAME take 11 bytes; the frame's own length (u64, little endian) is the last eight of them."""
    if len(pickled) < 11 or pickled[2:3] != b"\x95":
        return 0
    return 11 + int.from_bytes(pickled[3:11], "little")


def _first_item(pickled: bytes) -> str | None:
    """The name that is the first item of a pickled tuple of four."""
    ops = ((opcode.name, argument) for opcode, argument, _ in pickletools.genops(pickled))
    ops = ((name, argument) for name, argument in ops if name not in _NO_VALUE)
    try:
        if next(ops)[0] != "MARK":
            return None
        kind, first = next(ops)
        if kind in _BYTES:
            return CALLABLE
        if kind not in _TEXT or not _NAME.fullmatch(str(first)):
            return None
        # Two strings and STACK_GLOBAL are the module and the name of a class, not a method and its argument.
        return None if next(ops)[0] in _TEXT and next(ops)[0] == "STACK_GLOBAL" else str(first)
    except (ValueError, StopIteration):
        return None  # cut off, or no pickle

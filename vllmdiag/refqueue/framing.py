"""How an object becomes bytes in a slot, or frames on a socket, and an object again.

A message is a pickle and the large buffers that it refers to (pickle protocol 5, out of band). In a slot:

    [overflow u8 = 0][buffers u16] then each: [length u32][bytes]      big endian; the first buffer is the pickle
    [overflow u8 = 1]                                                  it did not fit: it comes by the socket
    [overflow u8 = 0][pickle]                                          bare, up to vLLM 0.11.0: nothing out of band

After an overflow byte the rest of the slot is what an older message left there. On a socket a message is the same
buffers, each a frame of its own.

A buffer that offers itself out of band (a `pickle.PickleBuffer`, a numpy array, ...) is taken only from 1 MiB on: below
that, one more copy into the pickle is cheaper than one more buffer to handle.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from .errors import BadMessageError, NotPicklableError, TooManyBuffersError

INLINE_BELOW = 1 << 20
"""Bytes from which a buffer travels beside the pickle and not in it."""

MOST_BUFFERS = (1 << 16) - 1

Buffers = Sequence[bytes | memoryview]

_OVERFLOW = 1
_COUNT = struct.Struct(">BH")  # with the overflow byte before it
_LENGTH = struct.Struct(">I")


class Framing(Protocol):
    """One of the two ways."""

    def encode(self, obj: Any) -> Buffers:
        """The pickle, then the buffers beside it.

        Raises:
            NotPicklableError: pickle refuses the object.
            TooManyBuffersError: see `MOST_BUFFERS`.
        """

    def put(self, slot: memoryview, buffers: Buffers) -> bool:
        """Write a message into a slot, or only the overflow byte and return False where it is too long for it."""

    def take(self, slot: memoryview) -> Any:
        """The object in a slot (not an overflow). Nothing of it refers to the slot, which will be overwritten.

        Raises:
            BadMessageError: the slot holds something else, or the pickle does not load here.
        """

    def join(self, frames: Buffers) -> Any:
        """The object of a message that came by a socket.

        Raises:
            BadMessageError: as in `take`.
        """


def is_overflow(slot: memoryview) -> bool:
    """Whether the message of this slot comes by the socket."""
    return slot[0] == _OVERFLOW


class Counted:
    """Since vLLM 0.11.1."""

    def encode(self, obj: Any) -> Buffers:
        """See `Framing`."""
        beside: list[memoryview] = []

        def keep_inline(offered: pickle.PickleBuffer) -> bool:
            raw = offered.raw()
            if raw.nbytes < INLINE_BELOW:
                return True
            beside.append(raw)
            return False

        pickled = _dumps(obj, keep_inline)
        if len(beside) >= MOST_BUFFERS:
            raise TooManyBuffersError(f"{1 + len(beside)} buffers in one message; {MOST_BUFFERS} can be counted")
        return [pickled, *beside]

    def put(self, slot: memoryview, buffers: Buffers) -> bool:
        """See `Framing`."""
        if _COUNT.size + sum(map(len, buffers)) + _LENGTH.size * len(buffers) > len(slot):
            slot[0] = _OVERFLOW
            return False
        _COUNT.pack_into(slot, 0, 0, len(buffers))
        end = _COUNT.size
        for buffer in buffers:
            start = end + _LENGTH.size
            _LENGTH.pack_into(slot, end, len(buffer))
            end = start + len(buffer)
            slot[start:end] = buffer
        return True

    def take(self, slot: memoryview) -> Any:
        """See `Framing`."""
        overflow, count = _COUNT.unpack_from(slot)
        if overflow or not count:
            raise BadMessageError("the slot holds no counted message", next="do both ends speak one dialect?")
        start, end = _span(slot, _COUNT.size)
        pickled, beside = slot[start:end], []
        for _ in range(count - 1):
            start, end = _span(slot, end)
            # Of the pickle nothing is kept, but of these all is: they are copied out of the slot.
            beside.append(bytearray(slot[start:end]))
        with pickled:
            return _loads(pickled, beside)

    def join(self, frames: Buffers) -> Any:
        """See `Framing`."""
        return _loads(frames[0], frames[1:])


class Bare:
    """Up to vLLM 0.11.0: every buffer goes into the pickle, which says by itself where it ends."""

    def encode(self, obj: Any) -> Buffers:
        """See `Framing`."""
        return [_dumps(obj)]

    def put(self, slot: memoryview, buffers: Buffers) -> bool:
        """See `Framing`."""
        (pickled,) = buffers
        if len(pickled) >= len(slot):
            slot[0] = _OVERFLOW
            return False
        slot[0] = 0
        slot[1 : 1 + len(pickled)] = pickled
        return True

    def take(self, slot: memoryview) -> Any:
        """See `Framing`."""
        with slot[1:] as pickled:
            return _loads(pickled)

    def join(self, frames: Buffers) -> Any:
        """See `Framing`."""
        return _loads(frames[0])


def _span(slot: memoryview, at: int) -> tuple[int, int]:
    """Where the buffer whose length stands at `at` begins and ends."""
    start = at + _LENGTH.size
    end = start + _LENGTH.unpack_from(slot, at)[0] if start <= len(slot) else start
    if end > len(slot):
        raise BadMessageError("a buffer is longer than its slot", next="do both ends speak one dialect?")
    return start, end


def _dumps(obj: Any, keep_inline: Any = None) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep_inline)
    except Exception as error:  # whatever the object's own __reduce__ raises
        raise NotPicklableError(f"a {type(obj).__name__} cannot be sent", why=str(error)) from error


def _loads(pickled: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    try:
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:  # whatever the object's own constructor raises
        raise BadMessageError("a message cannot be unpickled here", why=str(error)) from error

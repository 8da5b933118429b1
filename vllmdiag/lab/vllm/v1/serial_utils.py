"""Messages between server and engine: msgpack, with large buffers beside it as frames of their own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

_TOKENS = 1
"""Msgpack extension: the number of the frame that holds an array of token ids."""
_INLINE_BELOW = 256


class EngineCoreRequestType:
    """The first frame of a request."""

    ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
    WAKEUP, EXECUTOR_FAILED = b"\x05", b"\x04"


class MsgpackEncoder:
    """Object -> frames."""

    def encode(self, obj: Any) -> list[bytes]:
        """The message first, then the arrays of token ids that it refers to."""
        beside: list[bytes] = []

        def enc_hook(value: Any) -> Any:
            if not isinstance(value, array):
                raise TypeError(f"a message cannot carry a {type(value).__name__}")
            data = value.tobytes()
            if len(data) < _INLINE_BELOW:
                return list(value)
            beside.append(data)
            return msgspec.msgpack.Ext(_TOKENS, len(beside).to_bytes(2, "big"))

        return [msgspec.msgpack.encode(obj, enc_hook=enc_hook), *beside]


class MsgpackDecoder:
    """Frames -> object."""

    def decode(self, frames: Sequence[Any]) -> Any:
        """The object, its arrays of token ids put back."""

        def ext_hook(code: int, data: memoryview) -> Any:
            if code != _TOKENS:
                raise ValueError(f"unknown extension {code}")
            tokens = array("i")
            tokens.frombytes(bytes(frames[int.from_bytes(data, "big")]))
            return tokens

        return msgspec.msgpack.decode(frames[0], ext_hook=ext_hook)

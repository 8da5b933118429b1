"""A reader of pickles that hold plain values only: dict, list, tuple, str, bytes, int, float, bool, None.

Not a filter in front of `pickle`: it knows no opcode that names, builds or calls anything, so there is nothing to slip
past it, and its memo is a mapping, so an index of four billion costs nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

MAX_STEPS = 20_000_000

Value = object


class _Mark:
    """Where a group of values begins on the stack."""


_MARK = _Mark()
_EMPTY: dict[int, Callable[[], Value]] = {0x7D: dict, 0x5D: list, 0x29: tuple}
_CONSTANTS: dict[int, Value] = {0x4E: None, 0x88: True, 0x89: False}
_NUMBERS = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}
_TEXTS = {0x8C: "<B", 0x58: "<I", 0x8D: "<Q"}
_BYTES = {0x43: "<B", 0x42: "<I", 0x8E: "<Q"}
_LONGS = {0x8A: "<B", 0x8B: "<I"}
_PUTS = {0x71: "<B", 0x72: "<I"}
_GETS = {0x68: "<B", 0x6A: "<I"}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_STOP, _PROTO, _FRAME, _MEMOIZE, _MARK_OP, _TUPLE = 0x2E, 0x80, 0x95, 0x94, 0x28, 0x74
_APPEND, _APPENDS, _SETITEM, _SETITEMS = 0x61, 0x65, 0x73, 0x75


def loads(data: bytes) -> Value:
    """The value of a pickle. It may hold itself: whoever walks it must bound the depth.

    Raises:
        ValueError: it is broken, does not end, or wants anything but plain values.
    """
    reader = _Reader(data)
    try:
        return reader.run()
    except (IndexError, KeyError, TypeError, struct.error, OverflowError, RecursionError) as error:
        raise ValueError(f"broken at byte {reader.at}: {type(error).__name__}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Value] = []
        self.memo: dict[int, Value] = {}

    def run(self) -> Value:
        for _ in range(MAX_STEPS):
            op = self.data[self.at]
            self.at += 1
            if op == _STOP:
                (value,) = self._last(1)
                return value
            if not (self._value(op) or self._memory(op) or self._structure(op)):
                raise ValueError(f"opcode {op:#04x} at byte {self.at - 1} is not one of plain values")
        raise ValueError("it does not end")

    def _value(self, op: int) -> bool:
        if op in _CONSTANTS:
            self.stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            self.stack.append(_EMPTY[op]())
        elif op in _NUMBERS:
            self.stack.append(self._unpack(_NUMBERS[op]))
        elif op in _TEXTS:
            self.stack.append(self._counted(_TEXTS[op]).decode("utf-8", "surrogatepass"))
        elif op in _BYTES:
            self.stack.append(self._counted(_BYTES[op]))
        elif op in _LONGS:
            self.stack.append(int.from_bytes(self._counted(_LONGS[op]), "little", signed=True))
        else:
            return False
        return True

    def _memory(self, op: int) -> bool:
        if op in _PUTS:
            self.memo[self._number(_PUTS[op])] = self.stack[-1]
        elif op in _GETS:
            self.stack.append(self.memo[self._number(_GETS[op])])
        elif op == _MEMOIZE:
            self.memo[len(self.memo)] = self.stack[-1]
        elif op == _PROTO:
            self._take(1)
        elif op == _FRAME:
            self._take(8)
        else:
            return False
        return True

    def _structure(self, op: int) -> bool:
        if op == _MARK_OP:
            self.stack.append(_MARK)
        elif op == _TUPLE:
            self.stack.append(tuple(self._group()))
        elif op in _TUPLES:
            count = _TUPLES[op]
            self.stack.append(tuple(self._last(count)))
        elif op in {_APPEND, _APPENDS}:
            items = self._group() if op == _APPENDS else self._last(1)
            if not isinstance(self.stack[-1], list):
                raise TypeError
            self.stack[-1].extend(items)
        elif op in {_SETITEM, _SETITEMS}:
            items = self._group() if op == _SETITEMS else self._last(2)
            if not isinstance(self.stack[-1], dict):
                raise TypeError
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            return False
        return True

    def _group(self) -> list[Value]:
        """What was put on the stack since the last mark, taken off together with the mark."""
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise IndexError
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _last(self, count: int) -> list[Value]:
        """The last `count` values, taken off the stack."""
        items = self.stack[-count:]
        if len(items) != count or any(item is _MARK for item in items):
            raise IndexError
        del self.stack[-count:]
        return items

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise IndexError
        self.at += size
        return self.data[self.at - size : self.at]

    def _unpack(self, form: str) -> Value:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value

    def _number(self, form: str) -> int:
        value = self._unpack(form)
        if not isinstance(value, int):
            raise TypeError
        return value

    def _counted(self, form: str) -> bytes:
        return self._take(self._number(form))

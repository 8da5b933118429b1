"""The reader of plain pickles agrees with pickle on plain values, and has nothing to run anything else with."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.sources.plain_pickle import loads

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner) | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=25,
)


@given(value=VALUES, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back_as_pickle_would_give_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if any(op.name in {"GLOBAL", "STACK_GLOBAL"} for op, _, _ in pickletools.genops(data)):
        with pytest.raises(ValueError, match="not one of plain values"):  # protocol 2 writes bytes as a call
            loads(data)
    else:
        assert loads(data) == value


def test_a_value_that_is_used_twice_is_one_value() -> None:
    shared = ["x"]
    found = loads(pickle.dumps({"a": shared, "b": shared}, 2))
    assert isinstance(found, dict)
    assert found["a"] is found["b"]


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_value_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        loads(data)


@given(VALUES, st.data())
def test_a_pickle_cut_short_or_changed_ends_in_a_value_or_a_value_error(value: object, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, 2))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    for broken in (bytes(whole), bytes(whole[:at])):
        with contextlib.suppress(ValueError):
            loads(broken)


class Runs:
    """Unpickled by pickle, it runs a command."""

    def __init__(self, command: str, call: object = os.system) -> None:
        self.command, self.call = command, call

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.call, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_never_executed(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    for call in (os.system, subprocess.getoutput, eval):
        command = f"touch {trace}" if call is not eval else f"__import__('pathlib').Path({str(trace)!r}).touch()"
        data = pickle.dumps({"entries": [Runs(command, call)]}, protocol)
        with pytest.raises(ValueError, match="not one of plain values"):
            loads(data)
    assert not trace.exists()
    pickle.loads(data)
    assert trace.exists()  # it would have run


@pytest.mark.parametrize(
    "data",
    [
        b"(i__builtin__\neval\n.",  # INST
        b"\x80\x02c__builtin__\neval\n.",  # GLOBAL
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x82\x01.",  # EXT1
        b"P1\n.",  # PERSID
        b"\x80\x02}q\x00(b.",  # BUILD
        b"\x80\x05\x97.",  # NEXT_BUFFER
    ],
)
def test_every_opcode_that_reaches_outside_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not one of plain values"):
        loads(data)


def test_a_huge_memo_index_and_a_huge_length_cost_nothing() -> None:
    assert loads(b"\x80\x02]r\xff\xff\xff\xff.") == []
    with pytest.raises(ValueError, match="broken"):
        loads(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.")

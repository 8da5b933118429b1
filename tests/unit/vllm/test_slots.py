from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.slots import CALLABLE, framings, method_of
from vllmdiag.vllm.versions import in_range


def new_frame(message: object, buffers: tuple[bytes, ...] = ()) -> bytes:
    """As vLLM 0.11.1 and later write a slot."""
    parts = [pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), *buffers]
    head = b"\x00" + len(parts).to_bytes(2, "big")
    return head + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def old_frame(message: object) -> bytes:
    """As vLLM up to 0.11.0 writes a slot."""
    return b"\x00" + pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


FRAMES = [new_frame, old_frame]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens", "a", "_x.y"])
def test_the_method_is_read_in_both_framings(frame: Any, method: str) -> None:
    message = (method, ("SECRET prompt",), {"key": "SECRET"}, 0)
    slot = frame(message)
    assert method_of(slot) == (method, len(pickle.dumps(message, protocol=5)), False)
    stale = slot + b"\x80\x05older message" * 9
    assert method_of(stale)[0] == method


@pytest.mark.parametrize("frame", FRAMES)
def test_a_function_sent_by_value_is_a_callable(frame: Any) -> None:
    code = pickle.dumps(print)
    assert method_of(frame((code, (), {}, None)))[0] == CALLABLE
    assert method_of(frame((code * 99, (), {}, None))[:64])[0] is None  # its end is not in the bytes


def test_an_overflowed_slot_shows_nothing_of_the_older_message() -> None:
    older = new_frame(("execute_model", (), {}, 0))
    assert method_of(b"\x01" + older[1:]) == (None, 0, True)


def test_the_header_alone_gives_the_length() -> None:
    slot = new_frame(("execute_model", (1, 2), {}, 0))
    assert method_of(slot[:7]) == (None, len(slot) - 7, False)


@pytest.mark.parametrize("slot", [b"", b"\x00", b"\x00\x00", bytes(256), b"\x02" * 64, b"\xff" * 64])
def test_bytes_that_hold_no_message_give_none(slot: bytes) -> None:
    assert method_of(slot) == (None, 0, False)


class Status:
    """Pickled by reference: its module and name are strings at the start of the pickle."""


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    "message",
    [
        "hunter2",
        ("hunter2",),
        ("hunter2", 1),
        ("hunter2", 1, 2),
        ["hunter2", 1, 2, 3],
        {"hunter2": 1},
        {"hunter2"},
        b"hunter2",
        Status,
        (Status, "hunter2"),
        (Status, "hunter2", 1, 2),
        OrderedDict(hunter2=1),
        ("hunter 2", 1, 2, 3),
        ("", 1, 2, 3),
        ("x" * 82, 1, 2, 3),
        ("sk-hunter2", 1, 2, 3),
        (None, "hunter2", 1, 2),
        (("hunter2", 1, 2, 3), 1, 2, 3),
    ],
)
def test_what_is_no_rpc_gives_no_name(frame: Any, message: object) -> None:
    assert method_of(frame(message))[0] is None


SECRETS = st.text(min_size=1).map(lambda text: "SECRET" + text)
VALUES = st.recursive(
    SECRETS | st.integers() | st.none() | SECRETS.map(str.encode),
    lambda inner: st.lists(inner) | st.dictionaries(SECRETS, inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=12,
)


@given(
    st.sampled_from(FRAMES),
    st.sampled_from(["execute_model", "lab_noop"]),
    st.lists(VALUES).map(tuple),
    st.dictionaries(SECRETS, VALUES),
    st.none() | st.integers(0, 64),
    st.integers(0, 300),
)
def test_an_argument_never_comes_out(
    frame: Any, method: str, args: tuple[object, ...], kwargs: dict[str, object], rank: int | None, cut: int
) -> None:
    slot = frame((method, args, kwargs, rank))
    assert method_of(slot)[0] == method
    assert method_of(slot[:cut])[0] in (method, None)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash(slot: bytes) -> None:
    name, length, _ = method_of(slot)
    assert length >= 0
    assert name is None or name == CALLABLE or name.replace(".", "_").isidentifier()


@given(
    st.binary(max_size=200),
    st.sampled_from([b"\x00\x00\x01\x00\x00\x00\x99\x80\x05", b"\x00\x80\x05\x95", b"\x00\x80\x04("]),
)
def test_arbitrary_pickles_never_crash(rest: bytes, head: bytes) -> None:
    method_of(head + rest)


def test_each_version_has_one_framing() -> None:
    for version, pickle_at in [("0.8.5", 1), ("0.10.2", 1), ("0.11.0", 1), ("0.11.1", 7), ("0.32.0", 7)]:
        assert [f.pickle_at for f in framings() if in_range(version, f.since, f.until)] == [pickle_at]

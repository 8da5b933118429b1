"""The wire: what is sent to whom, and what is made of whatever comes back."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.sources.zmtp import (
    GREETING,
    SIGNATURE_BYTES,
    ClosedError,
    Hello,
    SilentError,
    UnexpectedError,
    ask,
    decode_ready,
    is_signature,
)

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(major: int = 3, minor: int = 1, mechanism: bytes = b"NULL") -> bytes:
    return SIGNATURE + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def ready(properties: dict[bytes, bytes], name: bytes = b"READY") -> bytes:
    pairs = (bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in properties.items())
    return bytes([len(name)]) + name + b"".join(pairs)


def frame(body: bytes, flags: int = 4) -> bytes:
    return (
        bytes([flags, len(body)]) + body
        if len(body) < 256
        else bytes([flags | 2]) + struct.pack(">Q", len(body)) + body
    )


def talk(answer: bytes, hang_up: bool = True) -> tuple[Hello | Exception, bytes]:
    """The outcome with a peer that says `answer`, and what was sent to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(answer)
        if hang_up:
            theirs.shutdown(socket.SHUT_WR)
        try:
            outcome: Hello | Exception = ask(ours, time.monotonic() + (60 if hang_up else 0))
        except (SilentError, ClosedError, UnexpectedError) as error:
            outcome = error
        ours.shutdown(socket.SHUT_WR)
        return outcome, theirs.recv(1 << 16)


def test_a_peer_that_introduces_itself_gets_a_greeting_and_nothing_more() -> None:
    hello, sent = talk(greeting() + frame(ready({b"Socket-Type": b"ROUTER", b"Identity": b"me"})))
    assert hello == Hello("3.1", "ROUTER", b"me")
    assert sent == GREETING
    assert len(sent) == 64
    assert b"READY" not in sent


def test_a_long_frame_is_read_as_a_short_one() -> None:
    properties = {b"Socket-Type": b"DEALER", b"Identity": b"x" * 255, b"X-Rest": b"y" * 300}
    assert talk(greeting() + frame(ready(properties)))[0] == Hello("3.1", "DEALER", b"x" * 255)


@pytest.mark.parametrize("answer", [b"", SIGNATURE[:9]], ids=["nothing", "half a signature"])
@pytest.mark.parametrize("hang_up", [True, False])
def test_nothing_is_sent_before_a_whole_signature_has_come(answer: bytes, hang_up: bool) -> None:
    outcome, sent = talk(answer, hang_up)
    assert isinstance(outcome, ClosedError if hang_up else SilentError)
    assert sent == b""


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400", b"SSH-2.0-OpenSSH", bytes(64), b"\xff" * 64])
def test_to_what_is_no_zmq_peer_nothing_is_sent(answer: bytes) -> None:
    outcome, sent = talk(answer)
    assert isinstance(outcome, UnexpectedError)
    assert sent == b""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (SIGNATURE, "signature came"),
        (greeting()[:40], "greeting stopped"),
        (greeting(), "no READY"),
        (greeting() + b"\x04", "no READY"),
        (greeting() + frame(ready({b"Socket-Type": b"PUB"}))[:-1], "READY stopped"),
    ],
)
def test_how_far_a_silent_peer_came_is_said(answer: bytes, words: str) -> None:
    outcome, _ = talk(answer, hang_up=False)
    assert isinstance(outcome, SilentError)
    assert words in str(outcome)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (greeting(major=1), "ZMTP 1"),
        (greeting(mechanism=b"CURVE"), "CURVE"),
        (greeting() + frame(ready({}), flags=0), "no READY"),
        (greeting() + b"\x06" + struct.pack(">Q", 1 << 40), "no READY"),
        (greeting() + frame(ready({}, name=b"ERROR")), "ERROR"),
        (greeting() + frame(b""), "empty"),
        (greeting() + frame(ready({b"Socket-Type": b"PUB"})[:-1]), "cut short"),
    ],
)
def test_what_else_a_peer_may_say_is_named(answer: bytes, words: str) -> None:
    outcome, _ = talk(answer)
    assert isinstance(outcome, UnexpectedError)
    assert words in str(outcome)


@given(st.one_of(st.binary(), st.binary().map(SIGNATURE.__add__), st.binary().map(greeting().__add__)))
def test_whatever_comes_it_gets_at_most_a_greeting_and_only_for_a_signature(answer: bytes) -> None:
    _, sent = talk(answer)
    assert sent == (GREETING if is_signature(answer[:SIGNATURE_BYTES]) else b"")


@given(st.dictionaries(st.binary(min_size=1, max_size=20).map(bytes.lower), st.binary(max_size=300)))
def test_properties_come_out_as_they_went_in(properties: dict[bytes, bytes]) -> None:
    decoded = decode_ready(ready(properties))
    assert decoded == {name.decode("ascii", "backslashreplace").lower(): value for name, value in properties.items()}


@given(st.one_of(st.binary(), st.binary().map(b"\x05READY".__add__)))
def test_any_bytes_are_properties_or_an_error_that_says_so(body: bytes) -> None:
    with contextlib.suppress(UnexpectedError):
        assert sum(map(len, decode_ready(body).values())) < len(body)


def test_a_peer_that_hangs_up_before_it_is_greeted_is_no_accident() -> None:
    def gone(theirs: socket.socket) -> None:
        theirs.sendall(SIGNATURE)
        theirs.close()

    assert isinstance(_outcome(gone), ClosedError)


def _outcome(act: Callable[[socket.socket], None]) -> Exception | None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        act(theirs)
        try:
            ask(ours, time.monotonic() + 60)
        except (SilentError, ClosedError, UnexpectedError) as error:
            return error
    return None

"""High-water marks: where messages go when their reader does not take them."""

from __future__ import annotations

import zmq

from .memory import mib, rollup
from .report import Report

_MARK = 10
_SIZE = 16 << 10
_MOST = 5000


def measure() -> Report:
    """See the package."""
    rows = []
    for name, kinds, mark in (
        (f"PUSH, marks of {_MARK}", (zmq.PUSH, zmq.PULL), _MARK),
        ("PUSH, no mark (as in vLLM)", (zmq.PUSH, zmq.PULL), 0),
        (f"PUB, marks of {_MARK}", (zmq.PUB, zmq.SUB), _MARK),
    ):
        sent, received, grown = _flood(*kinds, mark)
        end = "then send would wait" if sent < _MOST else "send never waits"
        rows += [
            (f"{name}: messages sent to a reader that does not read", f"{sent} of {_MOST}, {end}"),
            (f"{name}: of those the reader finds later", f"{received}"),
            (f"{name}: memory of the process grew by", mib(grown)),
        ]
    return Report(
        look_at=f"messages of {_SIZE >> 10} KiB over a local socket, and Rss in /proc/PID/smaps_rollup",
        rows=tuple(rows),
        learned="Without a mark a stuck reader shows in no socket: Recv-Q stays 0 and the memory of one side grows."
        " With one it shows as a sender that hangs in send. A PUB tells nobody what it drops.",
    )


def _flood(sender: int, receiver: int, mark: int) -> tuple[int, int, int]:
    """(messages that could be sent, messages found later, bytes that the process grew by)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    try:
        reading, writing = context.socket(receiver), context.socket(sender)
        for socket in (reading, writing):
            socket.set_hwm(mark)
        port = reading.bind_to_random_port("tcp://127.0.0.1")
        if receiver == zmq.SUB:
            reading.subscribe(b"")
        writing.connect(f"tcp://127.0.0.1:{port}")
        _joined(reading, writing)
        before, sent = rollup()["Rss"], 0
        try:
            while sent < _MOST:
                if not writing.poll(200, zmq.POLLOUT):
                    break
                writing.send(bytes(_SIZE), zmq.NOBLOCK)
                sent += 1
        except zmq.Again:
            pass
        grown = rollup()["Rss"] - before
        received = 0
        while reading.poll(200):
            reading.recv()
            received += 1
        return sent, received, grown
    finally:
        context.destroy()


def _joined(reading: zmq.Socket[bytes], writing: zmq.Socket[bytes]) -> None:
    """Return when a message gets through."""
    while not reading.poll(20):
        writing.send(b"are you there")
    while reading.poll(100):
        reading.recv()

"""PUB and SUB: a subscription takes a moment to reach the publisher, and what is sent before it is gone."""

from __future__ import annotations

import zmq

from .report import Report

_MESSAGES = 1000
_QUIET_MS = 300


def measure() -> Report:
    """See the package."""
    at_once, waited = _received(wait=False), _received(wait=True)
    return Report(
        look_at=f"how many of {_MESSAGES} messages arrive at a subscriber that connects right before they are sent",
        rows=(
            ("sent at once", f"{at_once} of {_MESSAGES} received"),
            ("sent after the publisher (XPUB) has seen the subscription", f"{waited} of {_MESSAGES} received"),
        ),
        learned="This is why a MessageQueue has wait_until_ready: the writer counts the subscriptions before it says"
        " READY. A reader that attaches late holds up the start of all; without the wait it would miss long messages.",
    )


def _received(*, wait: bool) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    try:
        publisher, subscriber = context.socket(zmq.XPUB), context.socket(zmq.SUB)
        for socket in (publisher, subscriber):
            socket.set_hwm(0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.subscribe(b"")
        if wait:
            publisher.recv()
        for _ in range(_MESSAGES):
            publisher.send(b"message")
        received = 0
        while subscriber.poll(_QUIET_MS):
            subscriber.recv()
            received += 1
        return received
    finally:
        context.destroy()

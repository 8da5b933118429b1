"""ROUTER and DEALER: the identity is the address. The front end of vLLM addresses an engine by its DP rank, 2 bytes."""

from __future__ import annotations

import zmq

from .report import Report

_WAIT_MS = 300


def measure() -> Report:
    """See the package."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    try:
        return _measure(context)
    finally:
        context.destroy()


def _dealer(context: zmq.Context[zmq.Socket[bytes]], identity: bytes) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.connect("inproc://front")
    dealer.send(b"HELLO")
    return dealer


def _measure(context: zmq.Context[zmq.Socket[bytes]]) -> Report:
    router = context.socket(zmq.ROUTER)
    router.bind("inproc://front")
    engines = [_dealer(context, rank.to_bytes(2, "little")) for rank in range(3)]
    hellos = [router.recv_multipart()[0].hex() for _ in engines]
    router.send_multipart([(1).to_bytes(2, "little"), b"for engine 1"])
    got = [engine.recv().decode() if engine.poll(_WAIT_MS) else "nothing" for engine in engines]
    twin = _dealer(context, (1).to_bytes(2, "little"))
    heard = "accepted" if router.poll(_WAIT_MS) else "its HELLO never arrives: the first of that name stays"
    router.send_multipart([(7).to_bytes(2, "little"), b"for nobody"])
    silent = "send returns, the message is gone"
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        router.send_multipart([(7).to_bytes(2, "little"), b"for nobody"])
        mandatory = "send returns"
    except zmq.ZMQError as error:
        mandatory = f"send fails: {error}"
    twin.close()
    return Report(
        look_at="who receives what a ROUTER sends to one identity",
        rows=(
            ("identities that the ROUTER learned from the first message of each", ", ".join(hellos)),
            *((f"engine {rank} received", text) for rank, text in enumerate(got)),
            ("a second DEALER with the identity of engine 1", heard),
            ("a message for engine 7, which there is not", silent),
            ("the same with ROUTER_MANDATORY", mandatory),
        ),
        learned="A request to an engine that has gone vanishes without an error. Two engines started with the same DP"
        " rank look like one that does not answer.",
    )

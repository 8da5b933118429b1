"""What an endpoint is for: by who is at its ends, by the order of opening, and surest by the type it tells."""

from __future__ import annotations

import msgspec
import pytest

from vllmdiag.diagnosis.view import view
from vllmdiag.model.sockets import Socket, SocketOwner, ZmtpProbe

from .scenario import API, ENGINE, Server

FIRST, SECOND = 1000, 1100


def names(*types: str) -> dict[str, tuple[str, str, bool]]:
    """Name, pattern and whether it was probed, of two endpoints that the engine is connected to, by their paths."""
    snapshot = Server().snapshot()
    api, engine = ((SocketOwner(pid=pid, fds=(5,)),) for pid in (API, ENGINE))
    more = (
        Socket(family="unix", inode=SECOND, state="LISTEN", local="/tmp/second", recv_q=0, send_q=100, owners=api),
        Socket(family="unix", inode=1102, state="ESTAB", local="/tmp/second", peer_inode=1103, owners=api),
        Socket(family="unix", inode=1103, state="ESTAB", peer_inode=1102, owners=engine),
    )
    probes = tuple(
        ZmtpProbe(endpoint="", inode=inode, owner=API, outcome="ready", socket_type=kind)
        for inode, kind in zip((FIRST, SECOND), types, strict=False)
    )
    seen = view(msgspec.structs.replace(snapshot, sockets=(*snapshot.sockets, *more), zmtp=probes))
    return {
        e.address.removeprefix("ipc:///tmp/"): (e.name, e.pattern, e.probe is not None)
        for e in seen.endpoints
        if e.address.startswith("ipc")
    }


def test_the_first_that_was_opened_is_the_input() -> None:
    assert names() == {"in": ("engine input", "ROUTER/DEALER", False), "second": ("engine output", "PULL/PUSH", False)}


def test_the_types_that_they_tell_are_surer_than_the_order() -> None:
    assert names("PULL", "ROUTER") == {
        "in": ("engine output", "PULL/PUSH", True),
        "second": ("engine input", "ROUTER/DEALER", True),
    }
    assert names("ROUTER", "PULL")["in"] == ("engine input", "ROUTER/DEALER", True)


@pytest.mark.parametrize("types", [("PULL",), ("PULL", "PULL"), ("XPUB", "XPUB")])
def test_types_that_do_not_fit_change_nothing(types: tuple[str, ...]) -> None:
    assert {path: name for path, (name, _, _) in names(*types).items()} == {
        "in": "engine input",
        "second": "engine output",
    }


def remote_readers(*, connected: int) -> list[str]:
    """Who is missing at the broadcast endpoint of a job of two nodes, two ranks each, seen from the first."""
    server = Server(args=("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-port", "29501"))
    engine = (SocketOwner(pid=ENGINE, fds=(9,)),)
    address = "127.0.0.1:40001"
    listener = Socket(family="tcp", inode=2000, state="LISTEN", local=address, send_q=100, owners=engine)
    far = [
        Socket(family="tcp", inode=2001 + n, state="ESTAB", local=address, remote=f"10.0.0.2:{5000 + n}", owners=engine)
        for n in range(connected)
    ]
    snapshot = server.snapshot()
    seen = view(msgspec.structs.replace(snapshot, sockets=(*snapshot.sockets, listener, *far)))
    (endpoint,) = [e for e in seen.endpoints if e.address == f"tcp://{address}"]
    return [endpoint.name, *(party.label for party in endpoint.expected)]


def test_ranks_of_other_nodes_that_are_not_connected_are_counted_where_they_belong() -> None:
    assert remote_readers(connected=2) == ["remote broadcast"]
    assert remote_readers(connected=1) == ["remote broadcast", "1 of 2 ranks of other nodes"]

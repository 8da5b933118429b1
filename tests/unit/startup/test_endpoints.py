"""Who should be at the other end of an address and is not: ranks at the store, engines, servers, another node."""

from __future__ import annotations

import msgspec

from tests.unit.diagnosis import startup_cases as cases
from tests.unit.diagnosis.scenario import API, ENGINE, WORKER0, Server
from vllmdiag.diagnosis.view import view
from vllmdiag.model.sockets import Socket, SocketOwner
from vllmdiag.model.view import EndpointView

STORE = "store at the master port"


def _tcp(inode: int, owner: int, **more: object) -> Socket:
    base = Socket(family="tcp", inode=inode, state="ESTAB", owners=(SocketOwner(pid=owner),))
    return msgspec.structs.replace(base, **more)


def _with_store(connected: bool) -> dict[str, EndpointView]:
    server = Server()
    cases.at_the_store(server)
    server.args = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29501")
    at = {"local": "127.0.0.1:29501", "remote": "127.0.0.1:5000"}
    sockets = [_tcp(1, WORKER0, state="LISTEN", local="*:29501", recv_q=0, send_q=4096)]
    if connected:
        sockets += [_tcp(2, WORKER0, **at), _tcp(3, WORKER0 + 1, local=at["remote"], remote=at["local"])]
    server.fields = {"sockets": tuple(sockets)}
    return {e.name: e for e in view(server.snapshot()).endpoints}


def test_the_store_names_the_ranks_and_the_node_that_are_not_at_it() -> None:
    store = _with_store(connected=False)[STORE]
    assert store.binder is not None
    assert store.binder.pid == WORKER0
    assert [party.label for party in store.expected] == ["Worker_TP1", "node 1 of 2"]


def test_a_rank_that_is_connected_is_not_awaited() -> None:
    store = _with_store(connected=True)[STORE]
    assert [party.label for party in store.expected] == ["node 1 of 2"]
    assert [c.peer.pid for c in store.connections] == [WORKER0 + 1]


def test_an_engine_that_is_connected_to_its_server_is_not_awaited_either() -> None:
    (endpoint,) = [e for e in view(Server().snapshot()).endpoints if e.name.startswith("engine")]
    assert endpoint.binder is not None
    assert (endpoint.binder.pid, [c.peer.pid for c in endpoint.connections]) == (API, [ENGINE])
    assert endpoint.expected == ()

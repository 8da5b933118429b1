"""`--probe-zmq` on a live server: every ZMQ endpoint tells the type it should have, nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Vllmdiag
from tests.vllm.server import Server
from tests.vllm.waiting import wait_until


def idle(server: Server, vllmdiag: Vllmdiag) -> bool:
    return bool(vllmdiag.json("diagnose", server.api).data["verdict"]["cause"] == "idle")


def types(endpoint: dict[str, Any]) -> set[str]:
    """What the table of endpoints says its binder may have bound."""
    return {pattern.partition("/")[0] for pattern in endpoint["pattern"].split(" or ")}


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("topology", [pytest.param(t, marks=pytest.mark.topology(t)) for t in ("tp2", "dp2")])
def test_every_zmq_endpoint_tells_its_type_and_the_server_serves_on(
    server: Server, vllmdiag: Vllmdiag, topology: str, busy: bool
) -> None:
    wait_until("the server is idle", lambda: idle(server, vllmdiag))
    if busy:
        with server.load(4) as load:
            answer = vllmdiag.json("endpoints", server.api, "--probe-zmq")
            before = load.completed
            wait_until("requests go on", lambda: load.completed > before + 4)
    else:
        answer = vllmdiag.json("endpoints", server.api, "--probe-zmq")
    assert answer.code == 0, answer.err
    endpoints = answer.data["endpoints"]
    probed = [e for e in endpoints if e["probe"] is not None]
    assert len(probed) >= 10
    assert {e["probe"]["outcome"] for e in probed} <= ({"ready"} if not busy else {"ready", "gated"}), probed
    for endpoint in probed:
        told = endpoint["probe"]["socket_type"]
        assert not told or told in types(endpoint), endpoint
    assert all(e["backlog"] not in (100, 128) for e in endpoints if e["probe"] is None)
    assert {e["address"].partition(":")[0] for e in probed} >= {"ipc"}
    status, _ = server.request(8).result()
    assert status == 200
    wait_until("the server is idle again", lambda: idle(server, vllmdiag))
    diagnosis = vllmdiag.json("diagnose", server.api, "--probe-zmq")
    assert diagnosis.code == 0
    assert f"{len(probed)} of {len(probed)} probed answer" in diagnosis.data["layers"][1]["summary"]

"""Never a false alarm: idle, under load, and at every moment of a start-up the verdict is healthy and exits 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import Vllmdiag
from tests.vllm.server import Server
from tests.vllm.waiting import wait_until

Launch = Callable[..., Server]
HEALTHY = {"idle", "serving", "busy"}
RUNS = 50


def test_an_idle_server_is_idle(server: Server, vllmdiag: Vllmdiag) -> None:
    wait_until("nothing runs any more", lambda: vllmdiag.json("diagnose", server.api, "--window", "1").code == 0)
    answer = vllmdiag.json("diagnose", server.api)
    assert answer.data["verdict"]["cause"] == "idle", answer.data["verdict"]
    assert answer.code == 0
    assert {layer["status"] for layer in answer.data["layers"]} == {"ok"}
    assert answer.data["target"]["vllm_version"] is not None


def test_fifty_runs_under_load_give_no_alarm(server: Server, vllmdiag: Vllmdiag) -> None:
    alarms = []
    with server.load(4):
        for _ in range(RUNS):
            answer = vllmdiag.json("diagnose", server.api, "--window", "0.5")
            if answer.code != 0 or answer.data["verdict"]["cause"] not in HEALTHY:
                alarms.append((answer.code, answer.out[:2000], answer.err))
    assert not alarms


def test_a_server_under_load_is_serving_and_its_ring_moves(server: Server, vllmdiag: Vllmdiag) -> None:
    with server.load(2):
        assert vllmdiag.json("diagnose", server.api).data["verdict"]["cause"] == "serving"
        rings = vllmdiag.json("ring", server.api).data["rings"]
    broadcast = next(r for r in rings if r["queue"] == "broadcast ring")
    assert broadcast["motion"] == "moving"
    assert broadcast["messages"] > 0
    assert broadcast["rate"] > 0
    assert [r["party"]["label"] for r in broadcast["readers"]] == ["Worker_TP0", "Worker_TP1"]
    assert broadcast["writer"]["label"] == "EngineCore"
    assert "confirmed by sockets" in broadcast["geometry_known_by"]


def test_a_request_given_up_by_its_client_leaves_no_alarm(server: Server, vllmdiag: Vllmdiag) -> None:
    call = server.request(1500, stream=True)
    assert call.started_to_answer.wait(60)
    call.cancel()
    wait_until("the server is quiet", lambda: vllmdiag.json("diagnose", server.api).data["verdict"]["cause"] == "idle")


@pytest.mark.parametrize("topology", ["tp2", "dp2"])
def test_a_start_up_looked_at_again_and_again_never_alarms(launch: Launch, vllmdiag: Vllmdiag, topology: str) -> None:
    server = launch(topology)
    seen: list[str] = []

    def ready() -> bool:
        # One look after the other from the fork on, each of 2 s: no moment of the start-up is left out.
        answer = vllmdiag.json("diagnose", server.roots[0], "--window", "2")
        assert answer.code == 0, (seen, answer.out, answer.err)
        seen.append(answer.data["verdict"]["cause"])
        return server.get_status("/health") == 200

    wait_until("the server is ready", ready, deadline_s=240)
    assert set(seen) <= {"starting", *HEALTHY}
    assert seen[0] == "starting"

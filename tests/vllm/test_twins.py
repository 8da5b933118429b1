"""With two engines or two API servers, one of them faulty: the instance is faulty, and the right twin is named."""

from __future__ import annotations

import pytest

from tests.vllm import faults
from tests.vllm.conftest import Vllmdiag
from tests.vllm.server import Server


@pytest.mark.topology("dp2")
def test_one_of_two_engines_stopped(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.stopped(server.engines[1]):
        verdict = vllmdiag.json("diagnose", server.roots[0]).data["verdict"]
        assert verdict["cause"] == "process-stopped"
        assert verdict["subject"]["pid"] == server.engines[1]
        assert verdict["subject"]["rank"] == {"dp": 1}
        assert verdict["subject"]["label"] == "EngineCore_DP1"
    assert vllmdiag.json("diagnose", server.roots[0]).code == 0


@pytest.mark.topology("dp2")
def test_one_of_two_api_servers_stopped(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.stopped(server.apis[1]):
        answer = vllmdiag.json("diagnose", server.roots[0])
        verdict = answer.data["verdict"]
        assert (answer.code, verdict["cause"]) == (2, "process-stopped")
        assert verdict["subject"]["pid"] == server.apis[1]
        assert verdict["subject"]["label"] == "APIServer_1"


@pytest.mark.topology("tp2dp2")
def test_one_of_four_workers_of_two_engines_stopped(server: Server, vllmdiag: Vllmdiag) -> None:
    worker = server.workers[3]
    with faults.stopped(worker):
        verdict = vllmdiag.json("diagnose", server.roots[0]).data["verdict"]
        assert verdict["cause"] == "process-stopped"
        assert verdict["subject"]["pid"] == worker
        assert verdict["subject"]["rank"] == {"dp": 1, "tp": 1}
        assert verdict["subject"]["label"] == "EngineCore_DP1/Worker_TP1"


@pytest.mark.topology("api2")
def test_one_of_two_api_servers_of_one_engine_stopped(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.stopped(server.apis[0]):
        answer = vllmdiag.json("diagnose", server.roots[0])
        assert (answer.code, answer.data["verdict"]["cause"]) == (2, "process-stopped")
        assert answer.data["verdict"]["subject"]["label"] == "APIServer_0"


@pytest.mark.topology("dp2")
def test_one_of_two_engines_works_and_the_other_hangs_in_a_call(server: Server, vllmdiag: Vllmdiag) -> None:
    with server.load(4, max_tokens=8), faults.stopped(server.workers[1]):
        answer = vllmdiag.json("diagnose", server.roots[0])
        assert (answer.code, answer.data["verdict"]["cause"]) == (2, "process-stopped")
        assert answer.data["verdict"]["subject"]["rank"]["dp"] == 1

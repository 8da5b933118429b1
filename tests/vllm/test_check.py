"""`check` as a probe of a real server: it never restarts one that is busy, idle or starting, and turns when one stands.

``VLLMDIAG_LOAD_S=300`` makes the load test as long as a release deserves; half a minute is for every day.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.vllm.conftest import Answer, Vllmdiag
from tests.vllm.faults import ring_full, stopped
from tests.vllm.server import START_DEADLINE_S, Server
from tests.vllm.waiting import wait_until

Launch = Callable[..., Server]
LOAD_S = float(os.environ.get("VLLMDIAG_LOAD_S", "30"))
STALL_S = 20.0
"""A kubelet that asks every 10 s and believes the second answer would have acted by then."""


def probe(vllmdiag: Vllmdiag, pid: int, profile: str) -> Answer:
    return vllmdiag.run("check", pid, "--profile", profile)


@pytest.mark.timeout(LOAD_S + 600)
def test_liveness_stays_0_through_a_saturating_load(server: Server, vllmdiag: Vllmdiag) -> None:
    wrong = []
    looks = 0
    with server.load(8) as load:
        end = time.monotonic() + LOAD_S
        while time.monotonic() < end:
            answer = probe(vllmdiag, server.api, "liveness")
            looks += 1
            if answer.code != 0 or not answer.out.startswith(("OK", "UNKNOWN")):
                wrong.append((answer.code, answer.out, answer.err))
        assert load.completed
    assert looks > LOAD_S / 10
    assert not wrong, f"{len(wrong)} of {looks}: {wrong[:3]}"


def test_an_idle_server_is_alive_and_ready_and_what_the_pipeline_expects(server: Server, vllmdiag: Vllmdiag) -> None:
    wait_until("nothing runs any more", lambda: "idle" in probe(vllmdiag, server.api, "liveness").out)
    assert probe(vllmdiag, server.api, "readiness").code == 0
    expected = vllmdiag.run(
        *("check", server.api, "--profile", "ci", "--wait", "30", "--window", "1"),
        *("--expect", "tp=2,pp=1,dp=1,workers=2,ready,health,metrics,ring=idle,api-servers=1"),
    )
    assert expected.code == 0, expected.out
    assert vllmdiag.run("check", server.api, "--profile", "ci", "--window", "1", "--expect", "tp=4").code == 2


def _turns(server: Server, vllmdiag: Vllmdiag, fault: AbstractContextManager[object], words: str) -> None:
    """The liveness turns 2 within the stall time while /health still says 200, and names what was done."""
    with fault:
        began = time.monotonic()
        answer = wait_until(
            "liveness fails",
            lambda: found if (found := probe(vllmdiag, server.api, "liveness")).code == 2 else None,
            deadline_s=STALL_S,
        )
        took = time.monotonic() - began
        assert server.get_status("/health") == 200
    assert answer is not None
    assert words in answer.out, f"after {took:.1f} s: {answer.out}"


def test_a_stopped_worker_turns_it_while_health_answers_and_it_heals(server: Server, vllmdiag: Vllmdiag) -> None:
    worker = server.workers[1]
    _turns(server, vllmdiag, stopped(worker), f"Worker_TP1 (pid {worker}) is stopped")
    assert probe(vllmdiag, server.api, "liveness").code == 0


def test_a_stopped_engine_turns_it_while_health_answers_and_it_heals(server: Server, vllmdiag: Vllmdiag) -> None:
    _turns(server, vllmdiag, stopped(server.engine), f"EngineCore (pid {server.engine}) is stopped")
    assert probe(vllmdiag, server.api, "liveness").code == 0


def test_from_the_start_over_a_full_ring_to_a_killed_engine(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("tp2")
    ready: list[int] = []

    def serves() -> bool:
        alive = probe(vllmdiag, server.roots[0], "liveness")
        assert alive.code == 0, (ready, alive.out, alive.err)
        ready.append(probe(vllmdiag, server.roots[0], "readiness").code)
        return ready[-1] == 0

    wait_until("it is ready by its own word", serves, deadline_s=START_DEADLINE_S)
    assert server.get_status("/health") == 200
    assert ready[0] == 1, "a start-up is not ready"
    assert set(ready[:-1]) == {1}

    server.warm_up()
    _turns(server, vllmdiag, ring_full(server, 1), "ring-full-slow-reader")

    # It takes its API server with it within the second: the look is under way when it dies.
    server.spoil("its engine was killed")
    killer = threading.Timer(1.5, os.kill, [server.engine, signal.SIGKILL])
    killer.start()
    answer = vllmdiag.run("check", server.api, "--profile", "liveness", "--window", "4")
    killer.join()
    assert answer.code == 2, answer.out + answer.err
    assert "engine-dead" in answer.out

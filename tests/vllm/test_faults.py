"""The verdict on a live server under each fault: cause, layer, subject, rank, chain, exit code, in text and JSON."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.vllm import faults, procs
from tests.vllm.conftest import Answer, Vllmdiag
from tests.vllm.server import Server
from tests.vllm.waiting import wait_until

Launch = Callable[..., Server]
LONG = 1500
"""Tokens of a request that is still under way when a fault is put in."""


def verdict_of(vllmdiag: Vllmdiag, pid: int) -> tuple[dict[str, Any], Answer, Answer]:
    """The verdict in JSON, with the raw answers in JSON and text."""
    as_json = vllmdiag.json("diagnose", pid)
    as_text = vllmdiag.text("diagnose", pid, "--window", "1.5")
    return as_json.data["verdict"], as_json, as_text


def check(  # one keyword for each thing that is promised
    vllmdiag: Vllmdiag,
    target: int,
    cause: str,
    layer: int,
    *,
    role: str,
    pid: int | None = None,
    rank: dict[str, int] | None = None,
    chain: Sequence[str] = (),
    code: int = 2,
) -> dict[str, Any]:
    """Hold one verdict against what was done to the server."""
    verdict, as_json, as_text = verdict_of(vllmdiag, target)
    assert verdict["cause"] == cause, as_text.out
    assert verdict["layer"] == layer
    assert verdict["subject"]["role"] == role
    if pid is not None:
        assert verdict["subject"]["pid"] == pid
    if rank is not None:
        assert verdict["subject"]["rank"] == rank
    if chain:
        assert [link["subject"]["label"] for link in verdict["chain"]] == list(chain)
    assert as_json.code == code
    assert as_text.code == code, as_text.out
    first = as_text.out.splitlines()[0]
    assert first.startswith({1: "WARNING", 2: "CRITICAL"}[code])
    assert verdict["summary"].split(":")[0].split(" (pid")[0] in first
    return verdict


def healthy(vllmdiag: Vllmdiag, server: Server, *causes: str) -> None:
    """The next run after a fault was healed says healthy."""
    answer = vllmdiag.json("diagnose", server.roots[0])
    assert answer.data["verdict"]["cause"] in (causes or ("idle", "serving", "busy")), answer.data["verdict"]
    assert answer.code == 0


def test_a_worker_stopped_while_idle_and_then_sent_a_request(server: Server, vllmdiag: Vllmdiag) -> None:
    worker = server.workers[1]
    with faults.stopped(worker):
        call = server.request(8)
        wait_until("its message waits for the stopped one", lambda: faults.broadcast_ring(server).unread(1))
        verdict = check(
            vllmdiag, server.api, "process-stopped", 1, role="Worker", pid=worker, rank={"tp": 1},
            chain=["client", "APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"],
        )  # fmt: skip
        assert verdict["chain"][3]["doing"] == "all_reduce"
        assert any("not read by reader 1" in words for words in verdict["evidence"])
        assert verdict["since_s"] > 0
        assert verdict["next"][0]["command"] == f"kill -CONT {worker}"
        assert server.get_status("/health") == 200
    assert call.result()[0] == 200
    healthy(vllmdiag, server)


def test_a_worker_stopped_in_mid_generation(server: Server, vllmdiag: Vllmdiag) -> None:
    call = server.request(LONG, stream=True)
    assert call.started_to_answer.wait(60)
    with faults.stopped(server.workers[1]):
        check(vllmdiag, server.engine, "process-stopped", 1, role="Worker", pid=server.workers[1], rank={"tp": 1})
    assert call.result()[0] == 200
    healthy(vllmdiag, server)


def test_the_engine_stopped(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.stopped(server.engine):
        call = server.request(8)
        verdict = check(
            vllmdiag, server.workers[0], "process-stopped", 1, role="EngineCore", pid=server.engine,
            chain=["client", "APIServer", "EngineCore"],
        )  # fmt: skip
        assert any("not read" in words for words in verdict["evidence"])
    assert call.result()[0] == 200
    healthy(vllmdiag, server)


def test_the_api_server_stopped_under_load(server: Server, vllmdiag: Vllmdiag) -> None:
    with server.load(2), faults.stopped(server.api):
        check(
            vllmdiag, server.engine, "process-stopped", 1, role="APIServer", pid=server.api,
            chain=["client", "APIServer"],
        )  # fmt: skip
    healthy(vllmdiag, server)


@pytest.mark.parametrize(("how", "code"), [("spin", 1), ("sleep", 2)])
def test_a_worker_in_one_long_call(server: Server, vllmdiag: Vllmdiag, how: faults.How, code: int) -> None:
    with faults.busy(server, 1, how):
        verdict = check(
            vllmdiag, server.api, "worker-busy", 3, role="Worker", pid=server.workers[1], rank={"tp": 1}, code=code,
            chain=["client", "APIServer", "EngineCore", "Worker_TP1"],
        )  # fmt: skip
        assert f"lab_{how}" in verdict["summary"]
    healthy(vllmdiag, server)


def test_a_client_that_does_not_read(server: Server, vllmdiag: Vllmdiag) -> None:
    with server.slow_client(2) as sockets:
        ports = {sock.getsockname()[1] for sock in sockets}
        wait_until("output is stuck in the kernel", lambda: all(send_queue(port) > 100_000 for port in ports))
        wait_until("the engine has finished", lambda: vllmdiag.json("diagnose", server.api, "--window", "1").code == 1)
        verdict = check(vllmdiag, server.api, "client-not-reading", 5, role="Client", code=1)
        assert any(str(port) in verdict["subject"]["label"] for port in ports)
    wait_until(
        "the connections are gone",
        lambda: vllmdiag.json("diagnose", server.api, "--window", "0.5").code == 0,
        deadline_s=90,
    )


def send_queue(client_port: int) -> int:
    """Bytes of the server's side of a connection that the client has not taken."""
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            _, _, remote, _, queues = line.split()[:5]
            if int(remote.split(":")[1], 16) == client_port:
                return int(queues.split(":")[0], 16)
    return 0


def test_socket_files_removed_are_a_finding_and_no_fault(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.sockets_unlinked(server):
        answer = vllmdiag.json("diagnose", server.api)
        assert (answer.code, answer.data["verdict"]["cause"]) == (0, "idle")
        assert [f["cause"] for f in answer.data["findings"] if f["cause"] == "ipc-path-removed"]
        assert server.request(4).result()[0] == 200


def test_the_broadcast_ring_full(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.ring_full(server, 1):
        verdict = check(
            vllmdiag, server.api, "ring-full-slow-reader", 3, role="Worker", pid=server.workers[1], rank={"tp": 1},
            chain=["client", "APIServer", "EngineCore", "Worker_TP1"],
        )  # fmt: skip
        assert any("10 of 10 slots" in words for words in verdict["evidence"])
        assert server.get_status("/health") == 200


def test_replies_left_in_a_response_ring(server: Server, vllmdiag: Vllmdiag) -> None:
    faults.leave_reply(server, 1)
    check(vllmdiag, server.api, "response-skew", 3, role="Worker", pid=server.workers[1], rank={"tp": 1})


def test_one_rank_alone_in_a_collective(server: Server, vllmdiag: Vllmdiag) -> None:
    with faults.lone_collective(server, 1):
        wait_until("rank 1 is in its barrier", lambda: vllmdiag.json("diagnose", server.api, "--window", "1").code == 2)
        check(vllmdiag, server.api, "collective-divergence", 4, role="Worker", pid=server.workers[0], rank={"tp": 0})


def test_a_worker_killed(server: Server, vllmdiag: Vllmdiag) -> None:
    # In the middle of a collective its peer would fail too, and the server end within the second; idle, the executor
    # takes 9 s to give up: there is time for one look, not for two.
    faults.kill(server, server.workers[1])
    verdict = vllmdiag.json("diagnose", server.api, "--window", "2").data["verdict"]
    assert (verdict["cause"], verdict["layer"]) == ("worker-dead", 1), verdict
    assert (verdict["subject"]["role"], verdict["subject"]["rank"]) == ("Worker", {"tp": 1})
    assert [link["subject"]["label"] for link in verdict["chain"]][-2:] == ["EngineCore", "Worker_TP1"]


def test_the_engine_killed_within_the_window(server: Server, vllmdiag: Vllmdiag) -> None:
    engine = server.engine
    server.spoil("its engine was killed")
    killer = threading.Timer(2.0, os.kill, [engine, signal.SIGKILL])
    killer.start()
    verdict = vllmdiag.json("diagnose", server.api, "--window", "4").data["verdict"]
    killer.join()
    assert (verdict["cause"], verdict["layer"]) == ("engine-dead", 1), verdict
    assert (verdict["subject"]["role"], verdict["subject"]["pid"]) == ("EngineCore", engine)


def test_the_engine_killed_under_a_stuck_worker_leaves_workers_without_an_engine(
    server: Server, vllmdiag: Vllmdiag
) -> None:
    workers, engine, api = server.workers, server.engine, server.api
    with faults.stopped(workers[1]):
        call = server.request(8)
        wait_until("its message waits", lambda: faults.broadcast_ring(server).unread(1))
        faults.kill(server, engine)
        wait_until("the server has ended", lambda: procs.state(api) in ("", "Z"))
        verdict = check(vllmdiag, workers[0], "engine-dead", 1, role="EngineCore")
        assert [link["subject"]["label"] for link in verdict["chain"]] == ["Worker_TP0", "Worker_TP1"]
        call.cancel()


def test_orphans_of_a_killed_api_server_then_what_is_left_when_they_are_killed_too(
    server: Server, vllmdiag: Vllmdiag
) -> None:
    engine, workers = server.engine, server.workers
    server.record()
    faults.kill(server, server.api)
    verdict = check(vllmdiag, engine, "orphan-engine", 1, role="EngineCore", pid=engine)
    assert any("none of them listens" in words for words in verdict["evidence"])
    segments = vllmdiag.json("shm", engine).data["segments"]
    held = {s["name"] for s in segments if s["holders"]}
    assert held
    assert not [s for s in segments if s["name"] in held and s["orphan"]], "segments that orphans hold are no garbage"

    for process in server.processes().values():
        os.kill(process.pid, signal.SIGKILL)
    wait_until("all are gone", lambda: not [p for p in (engine, *workers) if procs.state(p) not in ("", "Z")])
    answer = vllmdiag.json("diagnose")
    assert answer.code == 1, answer.out[:3000]
    assert (answer.data["verdict"]["cause"], answer.data["verdict"]["layer"]) == ("shm-full-of-leaks", 3)

    dry = vllmdiag.json("shm", "clean")
    assert {s["name"] for s in dry.data["segments"] if s["removable"]} >= {n for n in held if n.startswith("psm_")}
    assert all(os.path.exists(f"/dev/shm/{name}") for name in held if name.startswith("psm_"))
    done = vllmdiag.json("shm", "clean", "--yes")
    assert done.code == 0, done.out
    assert not [name for name in held if name.startswith("psm_") and os.path.exists(f"/dev/shm/{name}")]


def test_start_up_with_a_worker_stopped_before_it_has_a_title(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("tp2")
    second = wait_until("the second worker is spawned", lambda: _spawned_workers(server)[1:], 90, every_s=0.02)[0]
    with faults.stopped(second):
        assert "::" not in (procs.read(second) or _gone()).title, "it had its title before it could be stopped"
        wait_until("the engine waits for its workers", lambda: "wait" in _doing(vllmdiag, server, "EngineCore"))
        check(vllmdiag, server.roots[0], "process-stopped", 1, role="Worker", pid=second, rank={"tp": 1})
    server.wait_ready()
    healthy(vllmdiag, server)


def test_start_up_with_the_engine_stopped_after_hello(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("tp2")
    wait_until("the workers are spawned: HELLO was long ago", lambda: len(_spawned_workers(server)) >= 2, 90)
    engine = server.engine
    with faults.stopped(engine):
        verdict = check(vllmdiag, server.roots[0], "process-stopped", 1, role="EngineCore", pid=engine)
        assert [link["subject"]["label"] for link in verdict["chain"]][-2:] == ["APIServer", "EngineCore"]
    server.wait_ready()
    healthy(vllmdiag, server)


def _gone() -> Any:
    raise AssertionError("the process has ended")


def _spawned_workers(server: Server) -> list[int]:
    """Workers in the order they were spawned, titled or not."""
    processes = procs.scan()
    engines = [p for p in procs.children(server.roots, processes) if "resource_tracker" not in p.title]
    children = procs.children([e.pid for e in engines], processes)
    return sorted(p.pid for p in children if "resource_tracker" not in p.title)


def _doing(vllmdiag: Vllmdiag, server: Server, role: str) -> str:
    members = vllmdiag.json("ps", server.roots[0], "--window", "0.2").data["members"]
    return " ".join(m["doing"] for m in members if m["role"] == role)


def test_a_shm_of_64_mib_at_start(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("tp2", shm_size="64m")
    seen: list[str] = []

    def named() -> bool:
        answer = vllmdiag.json("diagnose", server.roots[0], "--window", "0.5")
        seen.append(answer.data["verdict"]["cause"] if answer.code in (0, 1, 2, 3) else f"exit {answer.code}")
        return seen[-1] == "shm-too-small"

    wait_until("the small /dev/shm is named before the server gives up", named)
    assert set(seen) <= {"starting", "shm-too-small"}


def test_a_shm_that_fills_up_later(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("tp2", shm_size="1g")
    server.wait_ready()
    with faults.shm_filled(server):
        check(vllmdiag, server.roots[0], "shm-exhausted", 3, role="EngineCore", pid=server.engine)

"""The ground of this tier: each fault is really in place, seen without vllmdiag, and a server leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm import faults, procs
from tests.vllm.server import Server
from tests.vllm.waiting import wait_until

Launch = Callable[..., Server]


def test_a_request_is_answered_and_streams(server: Server) -> None:
    status, text = server.request(8).result()
    assert status == 200
    assert '"completion_tokens":8' in text
    stream = server.request(200, stream=True)
    assert stream.started_to_answer.wait(60)
    assert stream.result()[0] == 200


def test_a_stopped_worker_hangs_a_request_until_it_goes_on(server: Server) -> None:
    ring = faults.broadcast_ring(server)
    with faults.stopped(server.workers[1]):
        call = server.request(8)
        wait_until("its message waits for the stopped one alone", lambda: ring.unread(1) and not ring.unread(0))
        assert call.running
        assert server.get_status("/health") == 200
    assert call.result()[0] == 200


def test_load_moves_the_ring(server: Server) -> None:
    ring = faults.broadcast_ring(server)
    seen = set()
    with server.load(2) as load:
        answered = load.completed
        while load.completed < answered + 3:
            seen.add(tuple(ring.rows()))
    assert len(seen) > 2


def test_a_client_that_does_not_read_fills_its_socket(server: Server) -> None:
    with server.slow_client(2) as sockets:
        ports = {sock.getsockname()[1] for sock in sockets}
        wait_until("output is stuck in the kernel", lambda: all(send_queue(port) > 100_000 for port in ports))


def send_queue(client_port: int) -> int:
    """Bytes of the server's side of a connection that the client has not taken."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, _, queues = line.split()[:5]
        if int(remote.split(":")[1], 16) == client_port:
            return int(queues.split(":")[0], 16)
    return 0


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_busy_worker_holds_up_requests_until_it_is_released(server: Server, how: faults.How) -> None:
    with faults.busy(server, 1, how) as call:
        waiting = server.request(4)
        assert call.running
        assert waiting.running
    assert call.result()[0] == 200
    assert waiting.result()[0] == 200


def test_without_its_socket_files_a_server_goes_on(server: Server) -> None:
    with faults.sockets_unlinked(server) as paths:
        assert len(paths) >= 10
        assert server.request(4).result()[0] == 200
    assert all(path.exists() for path in paths)


def test_the_ring_fills_up_and_blocks_its_writer(server: Server) -> None:
    ring = faults.broadcast_ring(server)
    with faults.ring_full(server, 1):
        assert ring.unread(1) == faults.SLOTS
        assert ring.unread(0) == 0
        wait_until("EngineCore spins", lambda: procs.state(server.engine) == "R")


def test_a_reply_is_left_behind(server: Server) -> None:
    faults.leave_reply(server, 1)
    assert server.get_status("/health") == 200


def test_one_worker_waits_in_a_collective_alone(server: Server) -> None:
    with faults.lone_collective(server, 1) as call:
        ring = faults.response_ring(server, 0)
        before = ring.rows()
        assert call.running
        assert ring.rows() == before


def test_a_killed_worker_takes_the_server_down(server: Server) -> None:
    root, worker = server.roots[0], server.workers[1]
    faults.kill(server, worker)
    wait_until("the server has ended", lambda: procs.state(root) in ("", "Z"), 120)


def test_a_killed_api_server_leaves_orphans(server: Server) -> None:
    engine, workers = server.engine, server.workers
    faults.kill(server, server.api)
    wait_until("the engine is an orphan", lambda: (p := procs.read(engine)) and p.ppid == 1)
    assert server.workers == workers


def test_a_full_dev_shm_kills_the_engine_at_its_next_write(launch: Launch) -> None:
    server = launch("tp2", shm_size="400m").wait_ready()
    engine = server.engine
    with faults.shm_filled(server):
        server.request(400)
        wait_until("the engine has died", lambda: procs.state(engine) in ("", "Z"))


def test_a_stopped_server_leaves_nothing(launch: Launch) -> None:
    server = launch("tp2", env={"TMPDIR": "/tmp"}).wait_ready()
    segments, sockets = server.segments(), procs.unix_paths(server.processes())
    assert len(segments) >= 4
    assert {Path(path).parent for path in sockets} == {Path("/tmp")}
    faults.kill(server, server.api)
    server.stop()
    assert not server.processes()
    left = [path for path in (*segments, *sockets, str(server.work)) if Path(path).exists()]
    assert left == []

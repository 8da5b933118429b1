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


def test_a_load_is_answered_again_and_again_and_ends(server: Server) -> None:
    with server.load(2) as load:
        answered = load.completed
        wait_until("more answers", lambda: load.completed > answered + 2)
    wait_until("nothing runs any more", lambda: server.metric("num_requests_running") == 0)


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

"""The RAS client on real sockets: each recorded report in both forms, many listeners on one port, servers that lie."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.gpu import fake_ras
from tests.unit.gpu.fake_ras import SAMPLES, Ras, Server
from vllmdiag.model.gpu import RasReport
from vllmdiag.sources.nccl_ras import Listener, RasError, _Talk, address, ask, survey

NAMES = sorted(path.stem for path in SAMPLES.glob("*.json"))
ME = (os.getpid(),)

Start = Callable[..., Listener]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def run(serve: Callable[[socket.socket], None] | None, port: int = 0) -> Listener:
        servers.append(Server(serve, port))
        return Listener("127.0.0.1", servers[-1].port, ME)

    yield run
    for server in servers:
        server.close()


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def stands_out(report: RasReport) -> dict[str, object]:
    """What a report says of the ranks that are not like the others, the same for both forms."""
    found: dict[str, object] = {"processes": report.processes, "size": {c.size for c in report.communicators}}
    for c in report.communicators:
        for rank in c.missing:
            found[f"missing {rank.rank}"] = (rank.status, rank.pid is not None)
        for rank in c.ranks:
            if rank.status != "running" or rank.error:
                found[f"rank {rank.rank}"] = (rank.status, bool(rank.error))
    found["dead"], found["silent"] = len(report.dead), len(report.silent)
    return found


EXPECTED: dict[str, dict[str, object]] = {
    "abort_rank1": {"rank 1": ("abort", False)},
    "async_error_rank2": {"rank 2": ("running", True)},
    "healthy_tp8": {},
    "init_rank3": {"rank 3": ("init", False)},
    "killed_70s": {"missing 5": ("dead", True), "dead": 1},
    "killed_now": {"missing 5": ("unresponsive", True), "silent": 1},
    "lag_rank3": {},
    "nocomm_rank2": {"missing 2": ("left", True)},
    "none_launched": {},
    "split_4_4": {},
    "stopped_70s": {"missing 5": ("dead", True), "dead": 1},
    "stopped_now": {"missing 5": ("unresponsive", True), "silent": 1},
    "two_comms": {},
}


def test_every_sample_has_an_expected_reading() -> None:
    assert sorted(EXPECTED) == NAMES
    assert len(NAMES) == 13


@pytest.mark.parametrize("version", [(2, 27, 3), (2, 30, 7)], ids=["text", "json"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_report_is_read_over_a_socket(name: str, version: tuple[int, ...], start: Start) -> None:
    server = Ras(name, version=version, chunk=37)
    report = ask(start(server), soon())
    size = (
        4
        if name in {"abort_rank1", "async_error_rank2", "init_rank3", "nocomm_rank2", "none_launched", "two_comms"}
        else 8
    )
    wanted = {"processes": size, "size": {size}, "dead": 0, "silent": 0, **EXPECTED[name]}
    assert stands_out(report) == wanted
    assert report.nccl_version == "2.30.7"
    assert report.format == ("json" if version >= (2, 28, 7) else "text")
    assert report.pid == os.getpid()


@pytest.mark.parametrize("version", [(2, 27, 3), (2, 30, 7)], ids=["text", "json"])
def test_only_harmless_commands_are_sent(version: tuple[int, ...], start: Start) -> None:
    server = Ras("healthy_tp8", version=version)
    ask(start(server), soon())
    assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize("command", [b"CONTROL PROFILER_MASK 1", b"DIAGNOSTICS", b"MONITOR", b"STATUS\nMONITOR", b""])
def test_no_other_command_can_be_sent(command: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with pytest.raises(ValueError, match="not a command that only reads"):
            _Talk(ours, soon(), None).send(command)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def say(data: bytes) -> Callable[[socket.socket], None]:
    def serve(link: socket.socket) -> None:
        link.recv(4096)
        link.sendall(data)
        link.recv(4096)

    return serve


def body(data: bytes) -> Ras:
    return Ras(body=lambda link: link.sendall(data))


HOSTILE: dict[str, tuple[Callable[[socket.socket], None] | None, str]] = {
    "silent": (None, "silent"),
    "closes at once": (lambda _link: None, "closed"),
    "http": (say(b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n"), "not-ras"),
    "binary": (say(bytes(range(256)) * 4), "not-ras"),
    "tls alert": (say(b"\x15\x03\x03\x00\x02\x02\x0a\n"), "not-ras"),
    "nul": (say(b"\0" * 4096), "not-ras"),
    "a line without end": (fake_ras.endless_line, "not-ras"),
    "a slow drip in place of a line": (fake_ras.drip, "silent"),
    "a report without end": (Ras(body=fake_ras.endless_line), "too-much"),
    "100 MB": (Ras(body=fake_ras.hundred_megabytes), "too-much"),
    "a slow drip": (Ras(body=fake_ras.drip), "late"),
    "an empty report": (body(b""), "malformed"),
    "wrong json": (body(b'{"nccl_version": 7, "communicators": {}}'), "malformed"),
    "half a json": (body((SAMPLES / "healthy_tp8.json").read_bytes()[:900]), "malformed"),
    "deep json": (body(b"[" * 200_000), "malformed"),
    "a report of NULs": (body(b"\0" * 100_000), "malformed"),
    "text where json was promised": (body((SAMPLES / "healthy_tp8.txt").read_bytes()), "malformed"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_server_is_told_for_what_it_is_within_the_deadline(what: str, start: Start) -> None:
    serve, kind = HOSTILE[what]
    with pytest.raises(RasError) as caught:
        ask(start(serve), soon(3.0 if kind == "late" else 60.0))
    assert caught.value.kind == kind
    assert str(caught.value)


def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(RasError) as caught:
            ask(Listener("127.0.0.1", free.getsockname()[1], ME), soon())
    assert caught.value.kind == "refused"


def look(listener: Listener) -> tuple[list[RasReport], list[RasError]]:
    return survey(listener, soon(), lambda: 0.5, lambda pid, told: pid == told)


def test_a_survey_ends_with_the_first_report_that_names_every_listener(start: Start) -> None:
    server = Ras("healthy_tp8", version=(2, 27, 3))
    found, errors = look(start(server))
    assert (len(found), errors, found[0].t) == (1, [], 0.5)
    assert server.commands.count("VERBOSE STATUS") == 1


def test_a_survey_meets_a_silent_server_with_two_more_tries_and_an_impostor_with_none(start: Start) -> None:
    assert [e.kind for e in look(start(None))[1]] == ["silent"] * 3
    assert [e.kind for e in look(start(HOSTILE["http"][0]))[1]] == ["not-ras"]


@pytest.fixture
def ranks() -> Iterator[Callable[[str], int]]:
    """Start ranks that share a port; the pid of each."""
    children: list[subprocess.Popen[str]] = []
    ports: list[int] = []

    def rank(sample: str) -> int:
        command = [sys.executable, "-S", str(Path(fake_ras.__file__)), sample, str(ports[0] if ports else 0)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        ports.append(int(child.stdout.readline()))
        return child.pid

    rank.ports = ports  # type: ignore[attr-defined]
    yield rank
    for child in children:
        child.kill()
        child.communicate()


def test_each_job_on_one_port_is_heard_and_told_apart_by_the_process_that_answered(
    ranks: Callable[[str], int],
) -> None:
    eight = [ranks("healthy_tp8") for _ in range(2)]
    four = [ranks("two_comms") for _ in range(2)]
    port = ranks.ports[0]  # type: ignore[attr-defined]
    jobs: dict[int, set[int | None]] = {8: set(), 4: set()}
    for _ in range(60):
        report = ask(Listener("127.0.0.1", port, (*eight, *four)), soon())
        jobs[report.communicators[0].size].add(report.pid)
    assert jobs == {8: set(eight), 4: set(four)}
    found, _ = survey(Listener("127.0.0.1", port, (*eight, *four)), soon(), time.monotonic, lambda *_: False)
    assert sorted(report.processes or 0 for report in found) == [4, 8]


def test_a_stopped_rank_among_others_costs_a_retry_and_no_report(ranks: Callable[[str], int]) -> None:
    pids = [ranks("healthy_tp8") for _ in range(6)]
    os.kill(pids[0], signal.SIGSTOP)
    try:
        listener = Listener("127.0.0.1", ranks.ports[0], tuple(pids))  # type: ignore[attr-defined]
        found, errors = survey(listener, soon(), time.monotonic, lambda *_: False)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert len(found) == 1
    assert {error.kind for error in errors} <= {"silent"}


@pytest.mark.needs("root", "unshare")
def test_a_rank_in_another_network_namespace_is_asked_there() -> None:
    command = ["unshare", "-n", sys.executable, "-S", str(Path(fake_ras.__file__)), "lag_rank3", "0", "--loopback-up"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        report = ask(Listener("127.0.0.1", port, (child.pid,)), soon())
        assert (report.pid, report.processes) == (child.pid, 8)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ("localhost", 28028)),
        ("127.0.0.2:29000", ("127.0.0.2", 29000)),
        ("[::1]:29000", ("::1", 29000)),
        ("nonsense", ("localhost", 28028)),
    ],
)
def test_the_address_is_the_one_that_any_of_the_processes_carries(value: str | None, wanted: tuple[str, int]) -> None:
    environments: list[dict[str, str]] = [{}, {"NCCL_RAS_ADDR": value} if value else {}]
    assert address(environments, "localhost", 28028) == wanted

"""GETs to real servers, kind and hostile: every one ends in a value, and only three paths are ever asked for."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.base import Missing
from vllmdiag.model.errors import UsageError
from vllmdiag.model.http import HttpProbe, MetricsScrape
from vllmdiag.sources.http import probe, scrape
from vllmdiag.sources.httpclient import MAX_BODY, Endpoint, get

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """A kind server, with bodies as uvicorn sends them (Content-Length) and as proxies do (chunked)."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar = {"/health": b"", "/version": b'{"version":"0.32.0"}', "/metrics": PAGE}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers['Host']} {self.headers['Connection']}")
        body = self.bodies[self.path]
        self.send_response(200)
        if self.path == "/metrics":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in (body[:7], body[7:]):
                self.wfile.write(b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def kind_server(host: str = "127.0.0.1") -> Iterator[int]:
    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accept one connection, take its request, let `serve` do what it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def once() -> None:
        with suppress(OSError):
            connection = listener.accept()[0]
            with connection:
                connection.recv(1 << 16)
                serve(connection)

    thread = threading.Thread(target=once)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def answer_to(raw: bytes, path: str = "/health", deadline_s: float = 20.0) -> HttpProbe:
    with raw_server(lambda connection: connection.sendall(raw)) as port:
        return probe(Endpoint(port), path, deadline_s=deadline_s)


def test_a_healthy_server_answers_with_the_time_of_every_stage() -> None:
    with kind_server() as port:
        seen = probe(Endpoint(port), "/health", t=1.5)
    assert (seen.t, seen.port, seen.path, seen.status, seen.error) == (1.5, port, "/health", 200, "")
    assert seen.connect_s is not None
    assert seen.first_byte_s is not None
    assert seen.total_s is not None
    assert 0 < seen.connect_s < seen.first_byte_s <= seen.total_s


def test_the_version_is_read_and_nonsense_is_no_version() -> None:
    with kind_server() as port:
        assert probe(Endpoint(port), "/version").version == "0.32.0"
    for body in (b"[1]", b'{"version":3}', b"\xff", b"[" * 100_000):
        assert answer_to(b"HTTP/1.1 200 OK\r\n\r\n" + body, "/version").version is None


def test_proxy_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with kind_server() as port:
        assert probe(Endpoint(port), "/health").status == 200


@pytest.mark.parametrize("host", ["", "0.0.0.0", "localhost", "127.0.0.1"])
def test_every_way_to_bind_ipv4_leads_to_loopback(host: str) -> None:
    with kind_server("0.0.0.0") as port:
        assert probe(Endpoint(port, host), "/health").status == 200
        assert Handler.asked[-1] == f"/health 127.0.0.1:{port} close"


@pytest.mark.needs("ipv6")
@pytest.mark.parametrize("host", ["::", "::1", "[::1]"])
def test_every_way_to_bind_ipv6_leads_to_loopback(host: str) -> None:
    with kind_server("::1") as port:
        assert probe(Endpoint(port, host), "/health").status == 200
        assert Handler.asked[-1] == f"/health [::1]:{port} close"


def test_a_name_is_not_looked_up() -> None:
    assert probe(Endpoint(80, "head-node"), "/health").error == "head-node is a name, not an address"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/sleep", "/health?x", ""])
def test_nothing_but_the_three_paths_is_ever_asked_for(path: str) -> None:
    Handler.asked.clear()
    with kind_server() as port, pytest.raises(UsageError, match="will not GET"):
        get(Endpoint(port), path, 1.0)
    assert Handler.asked == []


def test_a_port_nobody_listens_on_is_refused() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        seen = probe(Endpoint(bound.getsockname()[1]), "/health")
    assert (seen.status, seen.error, seen.connect_s) == (None, "refused", None)


def test_a_server_that_accepts_and_says_nothing_times_out_after_the_connect() -> None:
    release = threading.Event()
    with raw_server(lambda _: assert_set(release)) as port:
        seen = probe(Endpoint(port), "/health", deadline_s=0.3)
        release.set()
    assert (seen.status, seen.error, seen.first_byte_s, seen.total_s) == (None, "timeout", None, None)
    assert seen.connect_s is not None


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_stopped_server_is_connected_to_by_the_kernel_and_times_out(children: Any) -> None:
    pid, port = children.python(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
        "while True: s.accept()[0].close()"
    )
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    seen = probe(Endpoint(int(port), pid=pid), "/health", deadline_s=0.3)
    assert (seen.error, seen.connect_s is None, seen.first_byte_s) == ("timeout", False, None)


def test_a_full_backlog_times_out_before_the_connect() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            seen = probe(Endpoint(port), "/health", deadline_s=0.3)
    assert (seen.error, seen.connect_s) == ("timeout", None)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_slow_drip_ends_at_the_deadline(start: bytes) -> None:
    release = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(start)
        while not release.wait(0.02):
            connection.sendall(b"H" if not start else b"x")

    with raw_server(drip) as port:
        seen = probe(Endpoint(port), "/health", deadline_s=0.4)
        release.set()
    assert seen.error == ("not HTTP" if not start else "timeout")
    assert seen.first_byte_s is not None
    assert seen.total_s is None


def endless(chunk: bytes, start: bytes = b"HTTP/1.1 200 OK\r\n") -> HttpProbe:
    def pour(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:  # until the client closes
            connection.sendall(chunk)

    with raw_server(pour) as port:
        return probe(Endpoint(port), "/metrics", deadline_s=60)


def test_endless_answers_are_cut() -> None:
    assert endless(b"x" * 9999).error == "not HTTP: a line without an end"
    assert endless(b"name: value\r\n" * 100).error == "headers larger than 64 KiB"
    body = endless(b"x" * 65536, b"HTTP/1.1 200 OK\r\n\r\n")
    assert (body.error, body.status) == ("body larger than 8 MiB", 200)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert endless(b"8000\r\n" + b"x" * 0x8000 + b"\r\n", chunked).error == "body larger than 8 MiB"


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200", "closed within the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "closed within the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "body larger than 8 MiB"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "not HTTP: a broken chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", "not HTTP: a broken chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", "body larger than 8 MiB"),
        (b"\x00\x01\x02\x03\xff\xff\r\n\r\n", "not HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "tls"),
    ],
)
def test_a_bad_answer_is_named(raw: bytes, error: str) -> None:
    assert answer_to(raw).error == error


def test_a_server_known_to_speak_tls_is_not_contacted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        assert probe(Endpoint(listener.getsockname()[1], tls=True), "/health").error == "tls"
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_announcement_before_the_answer_is_skipped() -> None:
    seen = answer_to(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 503 Service Unavailable\r\n\r\n")
    assert (seen.status, seen.error) == (503, "")


@given(st.binary(max_size=300), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]))
def test_whatever_is_sent_ends_in_a_value(raw: bytes, start: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(start + raw)
        theirs.shutdown(socket.SHUT_WR)
        seen = probe_over(ours)
    assert seen.status in (None, *range(100, 1000))
    assert seen.error or seen.total_s is not None


def probe_over(connected: socket.socket) -> HttpProbe:
    """A probe whose connection is already there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllmdiag.sources.httpclient._socket", lambda _: (connected, "localhost"))
        patch.setattr("vllmdiag.sources.httpclient._connect", lambda *_: None)
        return probe(Endpoint(1), "/health", deadline_s=20)


def test_metrics_are_scraped_chunked_or_not() -> None:
    expected = {"num_requests_running": {"0": 2.0}}
    with kind_server() as port:
        assert scrape(Endpoint(port), t=2.0) == MetricsScrape(t=2.0, port=port, values=expected)
    with raw_server(lambda connection: connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE)) as port:
        assert scrape(Endpoint(port)) == MetricsScrape(t=0.0, port=port, values=expected)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n" + PAGE, "HTTP 404"),
        (b"HTTP/1.1 200 OK\r\n\r\npython_gc_objects 1\n", "no vLLM metric on the page"),
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + PAGE, "closed within the answer"),
    ],
)
def test_metrics_that_cannot_be_had_are_missing_with_the_reason(raw: bytes, why: str) -> None:
    with raw_server(lambda connection: connection.sendall(raw)) as port:
        hole = scrape(Endpoint(port))
    assert isinstance(hole, Missing)
    assert (hole.what, hole.why) == (f"metrics of port {port}", why)
    assert hole.next


def test_the_largest_body_that_is_read_is_read_whole() -> None:
    body = PAGE + b"#" * (MAX_BODY - len(PAGE))
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with raw_server(lambda connection: connection.sendall(raw)) as port:
        answer = get(Endpoint(port), "/metrics", 60)
    assert (answer.error, len(answer.body)) == ("", MAX_BODY)


UNIX_SERVER = """
import os, socket, sys
os.chdir({directory!r})
listener = socket.socket(socket.AF_UNIX)
listener.bind("uds")
listener.listen(0)
print("ready", flush=True)
if {answering}:
    connection = listener.accept()[0]
    connection.recv(9999)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
sys.stdin.read()
"""


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A directory whose path is too long for the address of a unix socket."""
    path = tmp_path / ("d" * 120)
    path.mkdir()
    return path


@pytest.mark.parametrize("form", ["as we see it", "as the server sees it", "relative to the server"])
def test_a_unix_socket_is_asked_however_its_path_is_given(children: Any, deep: Path, form: str) -> None:
    pid, _ = children.python(UNIX_SERVER.format(directory=str(deep), answering=True))
    uds = "uds" if form == "relative to the server" else str(deep / "uds")
    endpoint = Endpoint(0, uds=uds, pid=None if form == "as we see it" else pid)
    assert probe(endpoint, "/health", deadline_s=20).status == 200


def test_a_unix_socket_with_a_full_backlog_or_without_a_path_is_named(children: Any, deep: Path) -> None:
    children.python(UNIX_SERVER.format(directory=str(deep), answering=False))
    endpoint = Endpoint(0, uds=str(deep / "uds"))
    assert probe(endpoint, "/health", deadline_s=0.3).error == "timeout"  # the one place in the backlog
    waiting = [connect_later(deep / "uds") for _ in range(2)]
    assert probe(endpoint, "/health", deadline_s=20).error == "backlog full"
    for client in waiting:
        client.close()
    assert probe(Endpoint(0, uds=str(deep / "none")), "/health").error == "no such path or process"


def connect_later(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    handle = os.open(path, os.O_PATH)
    with suppress(BlockingIOError):
        client.connect(f"/proc/self/fd/{handle}")
    os.close(handle)
    return client


SERVER_IN_ITS_OWN_NETWORK = """
import subprocess, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.needs("root", "unshare", "ip")
def test_a_server_in_another_network_namespace_is_asked_there(
    children: Any, as_nobody: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, port = children.python(SERVER_IN_ITS_OWN_NETWORK, under=["unshare", "-n"])
    assert probe(Endpoint(int(port), pid=pid), "/health", deadline_s=20).status == 200
    assert probe(Endpoint(int(port)), "/health", deadline_s=20).error == "refused"
    refused = as_nobody(lambda: probe(Endpoint(int(port), pid=pid), "/health", deadline_s=20))
    assert (refused.status, refused.error) == (None, "permission denied")

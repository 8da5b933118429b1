"""`check --listen`: each scrape is answered with a check, made at most every few seconds, by prometheus_client."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllmdiag.model.check import CheckResult
from vllmdiag.model.errors import UsageError, VllmdiagError
from vllmdiag.render.openmetrics import failure, families


class _Checks(Collector):
    """A collector: asks when it is scraped and the last answer is too old. One check at a time."""

    def __init__(self, ask: Callable[[], CheckResult], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._held: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() - self._at >= self._every_s:
                self._held = self._fresh()
                self._at = time.monotonic()
            held = self._held
        yield from held

    def _fresh(self) -> list[Metric]:
        try:
            return list(families(self._ask()))
        except VllmdiagError as error:
            return list(failure(error))


def address(text: str) -> tuple[str, int]:
    """``127.0.0.1:9400``, ``[::1]:9400``, ``:9400`` or ``9400`` as host and port. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text} is no address", why="it has no port", next="--listen 127.0.0.1:9400")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104  the user leaves the host out


def serve(listen: str, ask: Callable[[], CheckResult], every_s: float, say: Callable[[str], None]) -> None:
    """Answer scrapes until SIGTERM; Ctrl-C raises KeyboardInterrupt. The listener is closed before this returns.

    Args:
        listen: where, see `address`. Port 0 takes a free one.
        ask: makes one check.
        every_s: an answer is given again for so long.
        say: told where it listens.

    Raises:
        UsageError: the address cannot be listened on.
    """
    host, port = address(listen)
    registry = CollectorRegistry()
    registry.register(_Checks(ask, every_s))
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, _setter(ended))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        signal.signal(signal.SIGTERM, before)
        raise UsageError(f"cannot listen on {listen}", why=error.strerror or str(error), next="--listen ADDR") from None
    try:
        say(f"http://{host}:{server.server_port}/metrics")
        ended.wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def _setter(event: threading.Event) -> Callable[[int, FrameType | None], None]:
    return lambda _signal, _frame: event.set()

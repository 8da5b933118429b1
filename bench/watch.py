"""What `vllmdiag watch` costs: the server it watches, itself, and memory.

``python bench/watch.py [PID PORT]``: PID is any process of a live instance that answers completions on PORT; without
one a miniature server is started. Tokens a second with `watch` and without it are measured in pairs of short turns, so
that what else runs on the machine hits both; then the CPU of `watch` while the server works and while it idles, that of
sampling alone, and its memory before and after a soak at a raised pace.

Exits with 1 where throughput with `watch` is shown to be less than 99 % of that without (on a busy machine the error of
the mean may be larger than that, and is printed), where `watch` takes more than 5 % of a core or the sampling of rings
alone more than 3 %, or where its memory grows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator

from bench.table import Row, show

ROUNDS = 20
TURN_S = 1.5
CPU_S = 40.0
SOAK_S = 40.0
CLIENTS = 2
WARM_S = 20.0
"""Until what `watch` saves up for looks when it starts is spent."""


@contextlib.contextmanager
def server() -> Iterator[tuple[int, int]]:
    """The pid and port of the command line, or those of a miniature."""
    if len(sys.argv) > 2:
        yield int(sys.argv[1]), int(sys.argv[2])
        return
    from vllmdiag.lab.server import Lab, Shape

    with Lab(Shape(tp=2)) as lab:
        lab.wait_ready()
        yield lab.root, lab.port


class Load:
    """Clients that ask again and again; `tokens` counts what they got."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._model = _model(port)
        self._end = threading.Event()
        self.tokens = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = json.dumps({"model": self._model, "prompt": "x", "max_tokens": 20, "ignore_eos": True}).encode()
        while not self._end.is_set():
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                usage = json.load(answer)["usage"]
            with self._lock:
                self.tokens += usage["completion_tokens"]

    def rate(self, seconds: float) -> float:
        """Tokens a second over so long."""
        before, began = self.tokens, time.monotonic()
        time.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - began)

    def end(self) -> None:
        """Finish what is under way."""
        self._end.set()
        for thread in self._threads:
            thread.join()


def _model(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, KeyError, ValueError):  # the miniature has no such page
        return "lab/tiny"


@contextlib.contextmanager
def watching(pid: int, *args: str) -> Iterator[int]:
    """A `watch --headless`; gives its pid once it watches."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "vllmdiag", "watch", str(pid), "--headless", "--bundles", directory]
        process = subprocess.Popen([*command, *args], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            process.stdout.readline()
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield process.pid
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> int:
    """Resident bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def share(pid: int, seconds: float) -> float:
    """Cores that a process uses, over so long."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def throughput(pid: int, port: int) -> tuple[float, float]:
    """Tokens with `watch` by tokens without: the mean over rounds of four turns, and twice its standard error.

    It is stopped and let go on in turns: with, without, without, with, so that a machine that grows busier hits both.
    """
    ratios = []
    load = Load(port)
    try:
        with watching(pid) as watcher:
            load.rate(WARM_S)
            for _ in range(ROUNDS):
                rates = []
                for watched in (True, False, False, True):
                    os.kill(watcher, signal.SIGCONT if watched else signal.SIGSTOP)
                    rates.append(load.rate(TURN_S))
                ratios.append((rates[0] + rates[3]) / (rates[1] + rates[2]))
    finally:
        load.end()
    return statistics.fmean(ratios), 2 * statistics.stdev(ratios) / ROUNDS**0.5


def sampling(pid: int) -> float:
    """Cores that reading the flags a hundred times a second takes, by itself."""
    from vllmdiag.sources.collect import collect
    from vllmdiag.watch.sampler import Sampler

    sampler = Sampler(collect(pid, None, 1.0, "ring"), 100.0)
    before, began = time.process_time(), time.monotonic()
    for _ in range(15):
        sampler.round(1.0, time.sleep)
    return (time.process_time() - before) / (time.monotonic() - began)


def main() -> int:
    """Measure, print, judge."""
    with server() as (pid, port):
        ratio, error = throughput(pid, port)
        alone = sampling(pid)
        load = Load(port)
        try:
            with watching(pid) as watcher:
                time.sleep(WARM_S)
                working = share(watcher, CPU_S)
            with watching(pid, "--status", "1", "--stall", "1") as watcher:
                time.sleep(WARM_S)
                first = rss(watcher)
                time.sleep(SOAK_S)
                last = rss(watcher)
        finally:
            load.end()
        with watching(pid) as watcher:
            time.sleep(WARM_S)
            idle = share(watcher, CPU_S)
    return show(
        "what watch costs",
        [
            Row(
                f"tokens: {ratio:.3f} +- {error:.3f}, upper end", ratio + error, 1.0, "without", unit="", at_least=0.99
            ),
            Row("CPU while the server works", working * 100, 100.0, "one core", unit="%", at_most=0.05),
            Row("CPU while it idles", idle * 100, 100.0, "one core", unit="%", at_most=0.05),
            Row("CPU of sampling at 100 Hz", alone * 100, 100.0, "one core", unit="%", at_most=0.03),
            Row("memory after the soak", last / 2**20, first / 2**20, "before it", unit="MiB", at_most=1.05),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

"""What a whole `vllmdiag diagnose` takes, beside what py-spy alone takes over the same processes one after another.

``python bench/run_cost.py [PID]``: PID is any process of a live instance; without one a small tree with the titles of
vLLM is started. Prints the time beyond the window, with the machine as it is and with every processor kept busy.
Exits with 1 where, on the machine as it is, that is more than the dumps of py-spy take.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import Row, show

ROUNDS = 5
WINDOW_S = 3.0
TREE = """
import ctypes, os, sys, threading, time

def title(text):
    fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))

def become(text, *below):
    title(text)
    for one in below:
        if os.fork() == 0:
            become(*one)
    wait()

def wait():
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    print(os.getpid(), flush=True)
    time.sleep(3600)

if os.fork() == 0:
    become(b"VLLM::EngineCore", (b"VLLM::Worker_TP0",), (b"VLLM::Worker_TP1",))
wait()
"""


@contextlib.contextmanager
def tree() -> Iterator[int]:
    """Four processes of 21 threads each; gives the pid of the first."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "vllm"
        program.write_text(TREE)
        # The port is nobody's: nothing is asked over HTTP.
        command = [sys.executable, str(program), "serve", "model", "--port", "1"]
        root = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert root.stdout is not None
        try:
            for _ in range(4):
                root.stdout.readline()
            yield root.pid
        finally:
            os.killpg(root.pid, 9)
            root.wait()
            root.stdout.close()


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Every processor is kept busy, twice."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    burners = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(pid: int) -> tuple[float, list[int]]:
    """Seconds beyond the window of one default run, and the processes it looked at."""
    command = [sys.executable, "-m", "vllmdiag", "diagnose", str(pid), "--format", "json"]
    begin = time.perf_counter()
    # As it is installed: its modules are compiled once, not at every start.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    taken = time.perf_counter() - begin
    target = json.loads(done.stdout)["target"]
    return taken - WINDOW_S, [p for name, pids in target.items() if name.endswith("_pids") for p in pids]


def py_spy(pids: list[int]) -> float:
    """Seconds that the dumps take one after another."""
    from vllmdiag.sources.stacks import find_py_spy

    program = str(find_py_spy())
    begin = time.perf_counter()
    for pid in pids:
        command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begin


def measure(machine: str, pid: int, at_most: float | None = None) -> Row:
    """One row of the table: the best of the rounds, taken in turn, because noise only ever adds."""
    beyond, dumps = [], []
    pids: list[int] = []
    for _ in range(ROUNDS):
        seconds, pids = run(pid)
        beyond.append(seconds)
        dumps.append(py_spy(pids))
    peer = f"py-spy dump, one after another, of the same {len(pids)}"
    return Row(f"diagnose, beyond its window, {machine}", min(beyond) * 1e3, min(dumps) * 1e3, peer, at_most=at_most)


def main() -> int:
    """Measure, print a table, judge."""
    with contextlib.ExitStack() as cleanup:
        pid = int(sys.argv[1]) if len(sys.argv) > 1 else cleanup.enter_context(tree())
        run(pid)  # whatever is read for the first time is read from the disk
        rows = [measure("machine as it is", pid, at_most=1.0)]
        with load():
            rows.append(measure("every processor busy", pid))
    return show(f"a default run, window {WINDOW_S:g} s, best of {ROUNDS}", rows)


if __name__ == "__main__":
    sys.exit(main())

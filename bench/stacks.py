"""Stacks of eight ranks at once, beside py-spy with one dump for each processor at a time.

``python bench/stacks.py``: eight Python processes of ten threads each are dumped together by the sampler of
`vllmdiag stacks`, and by py-spy alone in batches of as many as there are processors, of each batch the slowest dump
counted. Ours may take 1.3 times their sum. strace, where it is there, counts the system calls with which a process
could be paused (ptrace) or written to; there must be none. Exits with 1 where one of these is not held.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import Row, show

RANKS = 8
ROUNDS = 5
AT_MOST = 1.3
FORBIDDEN = "ptrace,process_vm_writev,kill,tkill,tgkill"
RANK = """
import threading, time

def work(depth):
    if depth:
        work(depth - 1)
    else:
        time.sleep(3600)

for _ in range(9):
    threading.Thread(target=work, args=(20,), daemon=True).start()
print("ready", flush=True)
work(60)
"""
DUMP = """
import sys
from vllmdiag.sources.stacks import StackSampler

dumps = StackSampler(map(int, sys.argv[1:]), 60.0).dump(0.0)
print(sum(isinstance(dump.threads, tuple) for dump in dumps.values()))
"""


@contextlib.contextmanager
def ranks() -> Iterator[list[int]]:
    """The processes, ready."""
    started = [subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE) for _ in range(RANKS)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def together(pids: list[int]) -> float:
    """Seconds for one dump of all."""
    from vllmdiag.sources.stacks import StackSampler

    sampler = StackSampler(pids, 60.0)
    begin = time.perf_counter()
    dumps = sampler.dump(0.0)
    taken = time.perf_counter() - begin
    assert all(isinstance(dump.threads, tuple) for dump in dumps.values()), "a dump is missing"
    return taken


def in_batches(pids: list[int], cores: int) -> float:
    """Seconds of py-spy alone: the slowest dump of each batch, added up."""
    from vllmdiag.sources.stacks import find_py_spy

    program, total = str(find_py_spy()), 0.0
    for first in range(0, len(pids), cores):
        begin = time.perf_counter()
        commands = [[program, "dump", "--json", "--nonblocking", "--pid", str(p)] for p in pids[first : first + cores]]
        batch = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        codes = [process.wait() for process in batch]
        total += time.perf_counter() - begin
        assert not any(codes), "a dump is missing"
    return total


def forbidden(pids: list[int]) -> int | None:
    """Calls that pause, signal or write to one of the ranks, in a dump of all; None without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        command = [strace, "-f", "-qq", "-e", f"trace={FORBIDDEN}", "-o", str(log), sys.executable, "-c", DUMP]
        done = subprocess.run([*command, *map(str, pids)], stdout=subprocess.PIPE, text=True, check=True)
        assert int(done.stdout) == len(pids), "a dump is missing"
        calls = log.read_text().splitlines()
    targets = "|".join(map(str, pids))
    return sum(re.search(rf"\b(?:ptrace|\w+)\((?:[A-Z_]+, )?(?:{targets})\b", call) is not None for call in calls)


def main() -> int:
    """Measure in turn, print the table, judge."""
    cores = min(RANKS, len(os.sched_getaffinity(0)))
    with ranks() as pids:
        together(pids)  # whatever is read for the first time is read from the disk
        all_at_once, batches = [], []
        for _ in range(ROUNDS):
            all_at_once.append(together(pids))
            batches.append(in_batches(pids, cores))
        calls = forbidden(pids)
    row = Row(
        what=f"stacks of {RANKS} ranks at once, {cores} processors",
        ours=min(all_at_once) * 1000,
        peer=min(batches) * 1000,
        peer_name=f"py-spy, {cores} at a time",
        at_most=AT_MOST,
    )
    code = show(f"dumps of {RANKS} Python processes of 10 threads, best of {ROUNDS}", [row])
    print(f"  calls that pause, signal or write to a rank: {'strace is not here' if calls is None else calls}")
    return code or int(bool(calls))


if __name__ == "__main__":
    sys.exit(main())

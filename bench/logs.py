"""What a log costs to read: seconds and memory, at three sizes, beside a loop over its lines and beside grep.

A log of four workers, interleaved, with a traceback in the middle and its echoes at the end is written to a temporary
directory. Exits with 1 when reading it takes many times as long as a loop of Python over the same lines, when the time
grows faster than the size, or when `vllmdiag triage` of the largest needs 300 MB of memory or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.table import Row, show

SIZES_MB = (10, 50, 200)
MOST_MB = 300.0
LOOP = "python: for line in file"
GREP = "grep -c ERROR"
TELL = """
import json, resource
{code}
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([sum(u.ru_utime + u.ru_stime for u in used), used[0].ru_maxrss / 1024]))
"""
COUNT = """
import subprocess
subprocess.run(["grep", "-c", "ERROR", {path!r}], stdout=subprocess.DEVNULL)
"""
READ = """
from vllmdiag.vllm.logscan import BLOCK_BYTES, Scanner
scanner = Scanner("vllm.log")
with open({path!r}, "rb") as file:
    while block := file.read(BLOCK_BYTES):
        scanner.feed(block)
assert scanner.result().digest.first_error.kind == "cuda_error"
"""
NOTHING = ""
LINES = """
with open({path!r}, "rb") as file:
    assert sum(b"ERROR" in line for line in file)
"""
TRIAGE = """
import io
from vllmdiag.bundle.triage import triage
from vllmdiag.diagnosis.judge import diagnose
assert diagnose(triage([{path!r}], io.BytesIO()).snapshot()).verdict.cause == "engine-dead"
"""


def write(path: Path, size: int) -> None:
    """A log of about that many bytes."""
    figures = "Avg prompt throughput: 812.4 tokens/s, Avg generation throughput: 1031.0 tokens/s, Running: 31 reqs"
    ordinary = [
        f"(APIServer pid=1) INFO 07-02 03:{{m:02d}}:{{s:02d}} [loggers.py:257] Engine 000: {figures}, Waiting: 0 reqs",
        'INFO:     10.0.0.{s}:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "(EngineCore pid=2) DEBUG 07-02 03:{m:02d}:{s:02d} [core.py:710] EngineCore loop active.",
        *(f"(Worker_TP{n} pid={3 + n}) DEBUG 07-02 03:{{m:02d}}:{{s:02d}} [worker.py:9] step done" for n in range(4)),
    ]
    core = "(EngineCore pid=2) ERROR 07-02 03:30:00 [core.py:710] "
    error = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        '  File "/v/vllm/v1/engine/core.py", line 3, in step',
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
    ]
    hour = "".join(line.format(m=n // 60, s=n % 60) + "\n" for n in range(3600) for line in ordinary)
    with path.open("w") as file:
        while file.tell() < size / 2:
            file.write(hour)
        file.writelines(f"{core}{line}\n" for line in error)
        while file.tell() < size:
            file.write(hour)
        file.write("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n")


def run(code: str, path: Path) -> tuple[float, float]:
    """Seconds of CPU, and MB of memory at the most, of some code in a process of its own."""
    program = TELL.format(code=code.format(path=str(path)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    seconds, memory = json.loads(done.stdout)
    return seconds, memory


def main() -> int:
    """Measure, print a table, judge."""
    rows: list[Row] = []
    per_mb: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in SIZES_MB:
            path = Path(directory) / f"{size}.log"
            write(path, size << 20)
            idle, _ = run(NOTHING, path)
            loop, _ = run(LINES, path)
            count, _ = run(COUNT, path)
            read, memory = run(READ, path)
            whole, most = run(TRIAGE, path)
            mb = path.stat().st_size / 2**20
            read, whole, loop, count = (1e3 * max(1e-4, used - idle) / mb for used in (read, whole, loop, count))
            per_mb.append(whole)
            rows += [
                Row(f"{size} MB: first error, per MB", read, loop, LOOP, at_most=40.0),
                Row(f"{size} MB: first error, per MB", read, count, GREP),
                Row(f"{size} MB: triage, per MB", whole, loop, LOOP, at_most=80.0),
                Row(f"{size} MB: memory of the reader", memory, MOST_MB, "bound", "MB", at_most=1.0),
                Row(f"{size} MB: memory of triage", most, MOST_MB, "bound", "MB", at_most=1.0),
            ]
            path.unlink()
    growth = f"triage, per MB at {SIZES_MB[-1]} MB"
    rows.append(Row(growth, per_mb[-1], per_mb[0], f"at {SIZES_MB[0]} MB", at_most=1.5))
    return show("logs, time of CPU", rows)


if __name__ == "__main__":
    sys.exit(main())

"""What the sockets of an instance cost on a host with 5,000 others, beside `ss` over the same tables.

A miniature server is the instance; another process holds 2,500 TCP connections with itself. Exits with 1 where one look
at the sockets, with owners and peers, takes more than 0.2 s.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from bench.table import Row, show
from vllmdiag.lab.server import Lab, Shape
from vllmdiag.sources.sockets import SocketWatch, owners_of, with_owners

ROUNDS = 7
PAIRS = 2500
MOST_S = 0.2
CROWD = f"""
import socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=128)
held = []
for _ in range({PAIRS}):
    near = socket.create_connection(listener.getsockname())
    held += [near, listener.accept()[0]]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def crowd() -> Iterator[None]:
    """5,000 sockets of a process that has nothing to do with the instance."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * PAIRS + 100
    if most != resource.RLIM_INFINITY and most < needed:
        raise SystemExit(f"needs {needed} descriptors in one process: ulimit -Hn is {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    with subprocess.Popen([sys.executable, "-c", CROWD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.stdin.close()


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def one_look(pids: list[int]) -> int:
    """What a run does once: the tables, the owners in the instance, and the owners of the far ends on the machine."""
    with closing(SocketWatch(pids)) as watch:
        watch.sample(0.0)
        sockets = watch.result()[0]
    strangers = [s.inode for s in sockets if not s.owners]
    return len(with_owners(sockets, owners_of(strangers)[0]))


def main() -> int:
    """Measure, print a table, judge."""
    with crowd(), Lab(Shape()) as lab:
        lab.wait_ready()
        pids = list(lab.processes())
        ours = best(lambda: one_look(pids))
        title = f"the sockets of {len(pids)} processes among {2 * PAIRS} others, best of {ROUNDS}"
        rows = [Row("one look, with owners and peers", ours * 1e3, MOST_S * 1e3, "bound", at_most=1.0)]
        if shutil.which("ss"):
            peer = best(lambda: subprocess.run(["ss", "-Hxtanp"], stdout=subprocess.DEVNULL, check=True))
            rows.append(Row("one look, with owners and peers", ours * 1e3, peer * 1e3, "ss -xtanp"))
        return show(title, rows)


if __name__ == "__main__":
    sys.exit(main())

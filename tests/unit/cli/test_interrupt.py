from __future__ import annotations

import subprocess
import sys

LOST = """
import os, signal, time
from vllmdiag.cli import interrupt

class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

interrupt.install()
Ends()
try:
    time.sleep(600)
except KeyboardInterrupt:
    interrupt.settle()
    print("arrived")
time.sleep(1)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_an_interrupt_that_python_loses_comes_again_once_and_without_a_traceback() -> None:
    done = run(LOST)
    assert (done.returncode, done.stdout, done.stderr) == (0, "arrived\n", "")


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    done = run(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from vllmdiag.cli import interrupt;"
        "interrupt.install(); print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    assert (done.stdout, done.stderr) == ("True\n", "")

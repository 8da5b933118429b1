"""How long the command takes to start, beside the interpreter and the parser library it stands on.

Exits with 1 when `vllmdiag --version` takes three times as long as importing typer alone, or `--help` more than 0.3 s
above that import: then something heavy is imported on the way.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench.table import Row, show

RUNS = 9
PEER = "python -c 'import typer'"
CASES = {
    "python -c pass": ["-c", "pass"],
    PEER: ["-c", "import typer"],
    "vllmdiag --version": ["-m", "vllmdiag", "--version"],
    "vllmdiag --help": ["-m", "vllmdiag", "--help"],
    "vllmdiag diagnose --help": ["-m", "vllmdiag", "diagnose", "--help"],
}


def best_of(args: list[str]) -> float:
    """Seconds of the fastest of `RUNS` runs: noise only ever adds."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> int:
    """Measure, print a table, judge."""
    seconds = {name: best_of(args) for name, args in CASES.items()}
    typer = seconds.pop(PEER)
    most = {"vllmdiag --version": 3.0, "vllmdiag --help": 1 + 0.3 / typer}
    rows = [Row(name, taken * 1e3, typer * 1e3, PEER, at_most=most.get(name)) for name, taken in seconds.items()]
    return show(f"start-up, best of {RUNS}", rows)


if __name__ == "__main__":
    sys.exit(main())

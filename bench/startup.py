"""How long the command takes to start, beside the interpreter and the parser library it stands on.

Exits with 1 when `vllmdiag --version` takes three times as long as importing typer alone, or `--help` more than 0.3 s
above that import: then something heavy is imported on the way.
"""

from __future__ import annotations

import subprocess
import sys
import time

RUNS = 9
CASES = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import typer'": ["-c", "import typer"],
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
    typer = seconds["python -c 'import typer'"]
    print(f"start-up, best of {RUNS}")
    for name, taken in seconds.items():
        print(f"  {name:28} {taken * 1000:7.0f} ms  {taken / typer:5.2f} x typer")
    return int(seconds["vllmdiag --version"] >= 3 * typer or seconds["vllmdiag --help"] > typer + 0.3)


if __name__ == "__main__":
    sys.exit(main())

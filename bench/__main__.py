"""All benches, one after the other, then every figure in one table: ``python -m bench [NAME...]``.

Exits with 1 when one of them is not within its bounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Row, text

HERE = Path(__file__).resolve().parent
NOT_A_BENCH = {"__main__", "table"}


def names() -> list[str]:
    """Every bench there is."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_A_BENCH)


def main(asked: list[str]) -> int:
    """Run those asked for, or all."""
    if unknown := set(asked) - set(names()):
        print(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(names())}", file=sys.stderr)
        return 64
    with tempfile.NamedTemporaryFile("r") as figures:
        search = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "VLLMDIAG_BENCH": figures.name, "PYTHONPATH": search}
        outcomes: dict[str, str] = {}
        for name in asked or names():
            print(f"== {name}", flush=True)
            begin = time.monotonic()
            code = subprocess.run([sys.executable, HERE / f"{name}.py"], env=env, check=False).returncode
            outcomes[name] = (
                f"{'held' if code == 0 else f'NOT HELD (exit code {code})'}, {time.monotonic() - begin:.0f} s"
            )
        rows = [Row(*json.loads(line)) for line in figures]
    print(f"\n== all figures of this run, on {os.cpu_count()} processors")
    print(text(rows), end="")
    print("".join(f"  {name:16} {outcome}\n" for name, outcome in outcomes.items()), end="")
    return int(any("NOT HELD" in outcome for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Records what the documents show from live lab servers: `python -m tools.session`.

The session in README.md is what `vllmdiag diagnose` prints for one; the views in docs/figures/lab.json are what the
figures are drawn from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from vllmdiag.diagnosis.view import view
from vllmdiag.lab.faults import named
from vllmdiag.lab.inject import inject
from vllmdiag.lab.server import Lab
from vllmdiag.model.view import InstanceView
from vllmdiag.render.document import to_json
from vllmdiag.sources.collect import collect

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
VIEWS = ROOT / "docs" / "figures" / "lab.json"

SESSION = "worker-stopped"
"""The fault that the README shows."""
RECORDED = ("serving", "worker-stopped", "ring-full")
"""What the figures show."""

_WARM_UP = 13
"""Tokens of the requests before a fault: a ring that has gone round tells more than a new one."""
_WIDTH = 122
_BLOCK = re.compile(r"(?<=\n    \$ vllmdiag diagnose\n)(?:    [^\n]*\n|\n(?=    ))+")


def broken(name: str) -> Lab:
    """A server with that fault in it; leaving it ends it."""
    fault = named(name)
    lab = Lab(fault.start())
    try:
        lab.wait_ready()
        lab.request(_WARM_UP).result()
        inject(lab, fault)
    except BaseException:
        lab.down()
        raise
    return lab


def session(pid: int) -> str:
    """What `vllmdiag diagnose` prints about an instance, without what else is found on this machine."""
    command = [sys.executable, "-m", "vllmdiag", "diagnose", str(pid)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    return done.stdout.partition("\nalso found\n")[0].partition("\ncould not observe\n")[0]


def recorded() -> str:
    """The session that the README shows."""
    found = _BLOCK.search(README.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("README.md shows no session of `vllmdiag diagnose`")
    return "".join(line.removeprefix("    ") for line in found[0].splitlines(keepends=True))


def form(text: str) -> list[str]:
    """What must be the same in every recording: the lines of the verdict and of the layers, numbers left out."""
    lines = re.sub(r"\d+(\.\d+)?", "N", text).splitlines()
    kept = [line for line in lines if not line.startswith("      ") and not re.match(r"  (next|target)\b", line)]
    return [re.sub(r"(  layer N \w+ +\S+ \w+) .*", r"\1", line).rstrip() for line in kept]


def _short(text: str) -> str:
    """Lines that are too long for a page end in dots."""
    return "".join(f"{line if len(line) <= _WIDTH else line[: _WIDTH - 4] + ' ...'}\n" for line in text.splitlines())


def _into_readme(text: str) -> None:
    block = "".join(f"    {line}".rstrip() + "\n" for line in _short(text).splitlines())
    README.write_text(_BLOCK.sub(lambda _: block, README.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> int:
    """Record, and write both."""
    views: dict[str, InstanceView] = {}
    for name in RECORDED:
        with broken(name) as lab:
            seen = view(collect(lab.root, window_s=2.0))
            views[name] = InstanceView(
                observed_at=seen.observed_at,
                window_s=seen.window_s,
                members=seen.members,
                rings=seen.rings,
                endpoints=seen.endpoints if name == "serving" else (),
            )
            if name == SESSION:
                _into_readme(session(lab.root))
    VIEWS.write_text(to_json(views), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The commands of the README, copied and pasted: a fresh clone, an empty home, nothing but Python and make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.delivery.conftest import ROOT

_BLOCKS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = "".join(_BLOCKS.findall((ROOT / "README.md").read_text(encoding="utf-8"))).splitlines()

# What the README takes for granted when it comes to `vllmdiag diagnose`: a server that hangs.
SERVER = """\
vllmdiag lab up --fault worker-stopped > lab.log &
server=$!
until grep -q '^in place' lab.log; do kill -0 $server || exit 97; sleep 0.1; done
"""


def _script() -> str:
    """The commands in their order, each followed by its exit code."""
    lines = []
    for command in COMMANDS:
        if command.startswith("vllmdiag ") and SERVER not in lines:
            lines.append(SERVER)
        lines += [command, "echo exit code $?"]
    return "\n".join([*lines, "kill -TERM $server; wait $server"])


@pytest.mark.needs("root", "git", "make", "unshare", "jq")
@pytest.mark.timeout(600)
def test_what_the_readme_says_happens(tmp_path: Path) -> None:
    home, clone, env = (tmp_path / name for name in ("home", "clone", "env"))
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    environment = {
        **kept,
        "HOME": str(home),
        "PATH": os.pathsep.join((str(env / "bin"), os.defpath)),
        "LANG": "C.UTF-8",
        "PIP_CACHE_DIR": cache.stdout.strip() or str(home / "cache"),
    }
    # Its own process ids: there `vllmdiag diagnose` finds one instance, whatever else runs on this machine.
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "bash", "-c", _script()]
    done = subprocess.run(
        alone, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    demo, install, diagnose, line = re.split(r"^exit code \d+\n", done.stdout, flags=re.MULTILINE)[:4]
    codes = re.findall(r"^exit code (\d+)$", done.stdout, re.MULTILINE)
    assert codes == ["0", "0", "2", "0"], done.stdout
    assert demo.endswith("ok\n"), demo
    assert "error" not in install.lower()
    assert re.match(r"CRITICAL  layer 1 process · Worker_TP1 \(pid \d+\) is stopped", diagnose), diagnose
    assert line == "critical process-stopped Worker_TP1\n"
    assert list(home.iterdir()) == [], "something was left in the home"

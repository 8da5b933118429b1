"""The table "What is seen as whom" of docs/containers.md, row by row: a lab server, and a look with other rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "containers.md"

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("setpriv", "unshare")]

_DOCKER = (
    "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,"
    "audit_write,setfcap"
)
"""What a container has where nothing is added or dropped."""


def _root(capabilities: str = "") -> list[str]:
    """Root with these capabilities alone."""
    return [
        "--inh-caps=-all",
        "--bounding-set=-all" + "".join(f",+{name}" for name in filter(None, capabilities.split(","))),
    ]


def _user(uid: int) -> list[str]:
    """Another user without capabilities, but for the one that lets it read this checkout, wherever that is."""
    reading = "-all,+dac_read_search"
    return [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--inh-caps={reading}", f"--ambient-caps={reading}"]


SERVERS = {"any user": _user(1000), "another user": _user(1000), "root": _root(_DOCKER)}
VIEWERS = {
    ("root", "SYS_PTRACE, DAC_READ_SEARCH"): _root("sys_ptrace,dac_read_search"),
    ("root", "SYS_PTRACE"): _root("sys_ptrace"),
    ("root", "what Docker gives by default"): _root(_DOCKER),
    ("root", "nothing (--cap-drop ALL)"): _root(),
    ("the same user", "nothing"): _user(1000),
    ("another user", "nothing"): _user(1001),
}
"""By the words of the table."""


def _rows() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(vLLM runs as, vllmdiag runs as, with, what is seen) for each row; marks of notes and code are left out."""
    table = PAGE.read_text(encoding="utf-8").partition("### What is seen as whom")[2].partition("\n## ")[0]
    lines = [re.sub(r"[`¹²]", "", line).strip("| ") for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    return [(server, viewer, given, tuple(seen)) for server, viewer, given, *seen in cells]


@contextmanager
def _server(as_whom: list[str]) -> Iterator[int]:
    """A lab server; its first pid."""
    home = tempfile.mkdtemp(prefix="as-whom-", dir="/var/tmp")  # not in /tmp, over which a test mounts another
    os.chmod(home, 0o777)
    command = ["setpriv", *as_whom, sys.executable, "-m", "vllmdiag", "lab", "up"]
    env = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as lab:
        try:
            assert lab.stdout is not None
            said = ""
            while not (found := re.search(r"vllmdiag diagnose (\d+)", said)):
                line = lab.stdout.readline()
                assert line, f"no server came: {said}"
                said += line
            yield int(found[1])
        finally:
            lab.terminate()
            lab.wait()
            shutil.rmtree(home)


@pytest.fixture(scope="module", params=[False, True], ids=["vLLM as another user", "vLLM as root"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[bool, int]]:
    with _server(SERVERS["root" if request.param else "any user"]) as pid:
        yield request.param, pid


def _look(pid: int, as_whom: list[str], within: Sequence[str] = ()) -> dict[str, Any]:
    command = [*within, "setpriv", *as_whom, sys.executable, "-m", "vllmdiag", "diagnose", str(pid), "--window", "1"]
    done = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_who_sees_what_is_what_the_table_says(server: tuple[bool, int]) -> None:
    is_root, pid = server
    rows = [row for row in _rows() if (row[0] == "root") == is_root]
    assert len(rows) >= 3
    for _, viewer, given, expected in rows:
        answer = _look(pid, VIEWERS[viewer, given])
        holes = " ".join(hole["what"] for hole in answer["missing"])
        layers = {layer["layer"]: layer["status"] for layer in answer["layers"]}
        seen = ("stacks of" not in holes, "sockets of" not in holes, layers[3] != "unknown")
        assert tuple("yes" if one else "no" for one in seen) == expected, f"{viewer} with {given}: {holes}"
        # who sees no stack does not call it healthy; who sees them does, with a layer that is not known
        assert answer["verdict"]["status"] == ("ok" if expected[0] == "yes" else "unknown")


def test_a_container_of_its_own_needs_no_mount_of_what_the_server_has(server: tuple[bool, int]) -> None:
    """Other file systems at /dev/shm and where its sockets lie than the server's, as in a sidecar."""
    environ = Path(f"/proc/{server[1]}/environ").read_text().split("\0")
    (sockets,) = [setting.partition("=")[2] for setting in environ if setting.startswith("VLLM_RPC_BASE_PATH=")]
    mounts = f'mount -t tmpfs none /dev/shm && mount -t tmpfs none {shlex.quote(sockets)} && exec "$@"'
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, "sh"]
    answer = _look(server[1], _root("sys_ptrace,dac_read_search"), apart)
    assert {layer["layer"]: layer["status"] for layer in answer["layers"]} == dict.fromkeys(range(1, 6), "ok")
    assert answer["verdict"]["cause"] == "idle"

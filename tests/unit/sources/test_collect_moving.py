"""A look at a machine that does not stand still, or that shows only a part of itself."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sources import fakes
from vllmdiag.cli.main import main
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.sources.collect import collect, list_instances

ROOT = Path(__file__).parents[3]
STORM = r"""
import ctypes, os, random, sys, time
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
start, end = int(fields[45]), int(fields[46])
names = [b"VLLM::EngineCore", b"VLLM::Worker_TP0", b"VLLM::Worker_TP1", b"python\0/x/vllm\0serve\0m", b"ps\0-ef"]
alive = 0
print("ready", flush=True)
while True:
    if os.fork() == 0:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name := random.choice(names), len(name))
        if random.random() < 0.2 and os.fork() == 0:  # an orphan in a moment
            os.setsid()
        time.sleep(random.random() / 20)
        os._exit(0)
    alive += 1
    while alive > 30 or (alive and random.random() < 0.5):
        os.wait()
        alive -= 1
"""
REUSE = r"""
import json, os, signal, subprocess, sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace
from tests.unit.sources import fakes
from vllmdiag.model.base import Missing
from vllmdiag.sources import observe, proc
from vllmdiag.sources.collect import collect

started = []

def program(*command, **options):
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options))
    return started[-1]

def stranger_with(pid):
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)
    while True:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"SECRET": "1"})
        if child.pid == pid:
            return
        child.kill()
        child.wait()

with tempfile.TemporaryDirectory() as directory:
    fake = fakes.start(SimpleNamespace(program=program), Path(directory))
    *_, first, second = fake.pids
    base = next(p for p in proc.scan() if p.pid == second)
    snapshot = collect(fake.api, window_s=1.0, meanwhile=lambda: stranger_with(first))
    stranger_with(second)
    after = observe.observe(base, allowed={"SECRET"})
seen = snapshot.process(first)
print(json.dumps({
    "state": seen.state,
    "last_dump": seen.stacks[-1].threads.why,
    "environ": after.environ,
    "exe": after.exe.why,
    "sockets": isinstance(after.socket_inodes, Missing),
}))
"""
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def run_main(*args: str) -> tuple[int, str, str]:
    """The command line program within this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue(), err.getvalue()


def storm(children: Any) -> None:
    children.python(STORM, start_new_session=True)


def test_hundreds_that_come_and_go_disturb_nothing_and_are_taken_for_nobody(children: Any, tmp_path: Path) -> None:
    fake = fakes.start(children, tmp_path)
    storm(children)
    for _ in range(6):
        snapshot = collect(fake.api, window_s=0.2)
        assert set(snapshot.target_pids) == set(fake.pids)
        assert diagnose(snapshot).verdict.subject.pid in fake.pids
        assert fake.api in {line.pid for line in list_instances()}


def test_a_target_that_comes_and_goes_is_judged_or_refused_in_words(children: Any, tmp_path: Path) -> None:
    storm(children)
    storm(children)
    codes = set()
    for _ in range(10):
        lines = list_instances()
        target = str(random.choice(lines).pid) if lines else "1"
        code, out, err = run_main("diagnose", target, "--window", "0.2", "--format", "json")
        assert code in (0, 1, 2, 3, 66), err
        assert bool(out) == (code != 66)
        codes.add(code)
        if out:
            assert json.loads(out)["verdict"]["status"] != "ok" or code == 0
    assert codes


@pytest.mark.needs("root", "unshare")
def test_a_pid_that_is_given_to_another_process_meanwhile_lends_it_nothing() -> None:
    own_pids = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*own_pids, sys.executable, "-c", REUSE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == ""
    assert told["last_dump"] == "the process has ended"
    assert (told["environ"], told["sockets"]) == ({}, True)
    assert "another process has its pid" in told["exe"]


@pytest.mark.needs("root", "unshare")
def test_a_server_next_door_is_not_taken_for_one_that_starts(children: Any, tmp_path: Path, as_nobody: Any) -> None:
    # Its namespaces cannot be entered: nobody knows whether it listens.
    box = ("unshare", "--mount", "--pid", "--fork", "--net", "--mount-proc", "--kill-child")
    fakes.start(children, tmp_path, under=box)
    (api,) = fakes.children_of(children.started[-1].pid)
    diagnosis = diagnose(as_nobody(lambda: collect(api, window_s=0.5)))
    assert diagnosis.verdict.status == "unknown"
    assert {layer.layer for layer in diagnosis.layers if layer.status == "ok"} == {1}
    assert all(hole.next for hole in diagnosis.missing)


def _hide(option: int) -> None:
    """In a mount namespace of our own: a /proc that hides others, and a /dev/shm without the leftovers of others."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"proc", b"/proc", b"proc", 0, f"hidepid={option}".encode()),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None),
    )
    assert not any(calls), os.strerror(ctypes.get_errno())


@pytest.mark.needs("root")
@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("chosen", [False, True])
def test_under_hidepid_nobody_is_said_to_be_hidden_rather_than_absent(
    option: int, chosen: bool, children: Any, tmp_path: Path, as_nobody: Any
) -> None:
    fake = fakes.start(children, tmp_path)
    words = ["diagnose", *([str(fake.api)] if chosen else [])]
    run_main("diagnose", str(fake.api), "--window", "0.2")  # loads, with every privilege, what is loaded late
    code, out, err = as_nobody(lambda: run_main(*words), before=lambda: _hide(option))
    assert (code, out) == (66, "")
    assert f"process {fake.api} is not visible" in err if chosen else "no vLLM process is visible" in err
    assert f"hidepid={option}" in err
    assert "next: run as root, or as the user that runs vLLM" in err

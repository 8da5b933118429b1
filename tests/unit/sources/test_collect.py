"""One look at trees of small processes that have the titles of vLLM: what it holds to while they die, hang or lie."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sources import fakes
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.base import Missing
from vllmdiag.model.errors import TargetError
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.sources.collect import collect, list_instances

WINDOW_S = 0.5


def look(fake: fakes.Fake, **options: Any) -> Snapshot:
    return collect(fake.api, window_s=WINDOW_S, **options)


def what_is_missing(snapshot: Snapshot) -> str:
    return "\n".join(f"{hole.what}: {hole.why}" for hole in diagnose(snapshot).missing)


@pytest.fixture
def fake(children: Any, tmp_path: Path) -> fakes.Fake:
    return fakes.start(children, tmp_path)


class Tool:
    """vllmdiag as a program, with a py-spy of the test's own (or none) beside its interpreter."""

    def __init__(self, directory: Path) -> None:
        self.python = directory / "bin" / "python"
        self.python.parent.mkdir()
        self.python.symlink_to(os.path.realpath(sys.executable))
        paths = (str(Path(__file__).parents[3]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        self.environment = {"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}

    def py_spy(self, script: str) -> None:
        path = self.python.parent / "py-spy"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self, *args: str | float) -> subprocess.Popen[str]:
        command = [str(self.python), "-m", "vllmdiag", *map(str, args)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def diagnose(self, fake: fakes.Fake) -> tuple[int, dict[str, Any]]:
        child = self.start("diagnose", fake.api, "--window", WINDOW_S, "--format", "json")
        out, err = child.communicate(timeout=60)
        assert not err
        return child.returncode, json.loads(out)


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    return Tool(tmp_path)


@pytest.fixture
def no_leak(eventually: Any) -> Iterator[None]:
    """Threads, descriptors and child processes are the same after the test as before."""

    def now() -> tuple[int, int, set[int]]:
        return threading.active_count(), len(os.listdir("/proc/self/fd")), fakes.descendants(os.getpid())

    before = now()
    yield
    eventually(lambda: now() == before)


def test_the_members_are_watched_and_nobody_else(fake: fakes.Fake) -> None:
    snapshot = look(fake)
    assert set(snapshot.target_pids) == set(fake.pids)
    assert all(len(p.samples) >= 2 for p in snapshot.processes if p.pid in fake.pids)
    assert [probe.status for probe in snapshot.http] == [200, 200]


@pytest.mark.usefixtures("fake")
def test_a_look_leaves_nothing_open_or_running(children: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    fake = fakes.start(children, tmp_path)
    look(fake)
    request.getfixturevalue("no_leak")
    look(fake)


def test_a_look_that_fails_leaves_nothing_open_or_running(fake: fakes.Fake, no_leak: None) -> None:
    def fails() -> None:
        raise RuntimeError("in mid-window")

    with pytest.raises(RuntimeError, match="in mid-window"):
        look(fake, meanwhile=fails)


def test_the_window_is_as_long_as_asked_and_never_shorter_than_its_samples(fake: fakes.Fake) -> None:
    for window_s in (0.2, 1.0):
        snapshot = collect(fake.api, window_s=window_s)
        times = [sample.t for process in snapshot.processes for sample in process.samples]
        assert window_s <= snapshot.window_s
        assert max(times) <= snapshot.window_s


def test_a_slow_start_takes_at_most_a_quarter_of_the_window(fake: fakes.Fake) -> None:
    snapshot = collect(fake.api, window_s=1.0, asked=time.monotonic() - 100)
    assert snapshot.window_s >= 0.75


def test_every_member_may_die_in_mid_window(fake: fakes.Fake, eventually: Any) -> None:
    def kill() -> None:
        for pid in fake.pids:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(fakes.alive, fake.pids)))

    snapshot = look(fake, meanwhile=kill)
    assert all(p.state in ("", "Z") for p in snapshot.processes if p.pid in fake.pids)
    verdict = diagnose(snapshot).verdict
    assert verdict.status == "critical"
    assert verdict.subject.pid in {*fake.pids, None}


def test_a_member_that_appears_in_mid_window_is_shown(fake: fakes.Fake, eventually: Any) -> None:
    def appear() -> None:
        os.kill(fake.engine, signal.SIGUSR1)
        eventually(lambda: len(fakes.descendants(fake.engine)) > 2)

    snapshot = look(fake, meanwhile=appear)
    (born,) = fakes.descendants(fake.engine) - set(fake.pids)
    assert snapshot.process(born) is not None
    assert diagnose(snapshot).verdict.subject.pid != born


def test_the_tool_itself_is_no_instance() -> None:
    with pytest.raises(TargetError, match="not part of a vLLM instance"):
        collect(os.getpid(), window_s=0.2)


def test_a_tool_that_the_server_has_started_takes_itself_for_no_sign_of_life(children: Any, tmp_path: Path) -> None:
    # A plug-in, or a shell in the server: the tool and its helpers are then children of the instance.
    command = f"{sys.executable} -m vllmdiag ps $PPID --window {WINDOW_S} --format json --output {tmp_path}/out; echo"
    fake = fakes.start(children, tmp_path, "--run", f"{command}; read _")
    children.line(fake.api)
    members = json.loads((tmp_path / "out").read_text())["members"]
    (shell,) = fakes.children_of(fake.api) - {fake.engine}
    assert {m["pid"]: m["role"] for m in members if m["pid"] not in fake.pids} == {shell: "Helper"}
    os.kill(shell, signal.SIGKILL)


def test_two_instances_are_listed_and_one_is_asked_for(children: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = fakes.start(children, tmp_path), fakes.start(children, tmp_path / "other")
    assert {first.api, second.api} <= {line.pid for line in list_instances()}
    command = [sys.executable, "-m", "vllmdiag", "diagnose"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 66
    assert not done.stdout
    for fake in (first, second):
        assert f"APIServer {fake.api} port {fake.port} model, 4 processes" in done.stderr
        assert collect(None, fake.port, window_s=0.2).target_pids == fake.pids
    assert "next:" in done.stderr


def test_without_py_spy_there_is_a_diagnosis_that_says_so(fake: fakes.Fake, tool: Tool) -> None:
    code, diagnosis = tool.diagnose(fake)
    assert code == {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[diagnosis["verdict"]["status"]]
    assert code == 3
    holes = {hole["what"]: hole for hole in diagnosis["missing"]}
    assert holes["stacks"]["why"] == "py-spy is not installed"
    assert holes["stacks"]["next"] == "pip install py-spy"


def test_a_py_spy_that_hangs_is_killed_and_missed(
    fake: fakes.Fake, tool: Tool, tmp_path: Path, eventually: Any
) -> None:
    tool.py_spy(f"echo $$ >> {tmp_path}/pids; exec /bin/sleep 3600")
    code, diagnosis = tool.diagnose(fake)
    assert code == 3
    late = [hole for hole in diagnosis["missing"] if hole["what"].startswith("stacks of pid")]
    assert [hole["what"] for hole in late] == [f"stacks of pid {pid}" for pid in fake.pids]
    assert all(hole["why"].startswith("late:") and hole["next"] for hole in late)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == len(fake.pids), "what was late once is not asked for again when the window is over"
    assert not any(map(fakes.alive, pids))


def test_a_py_spy_that_lies_is_missed(fake: fakes.Fake, tool: Tool) -> None:
    tool.py_spy("echo '[{\"frames\": 7}]'")
    code, diagnosis = tool.diagnose(fake)
    assert code == 3
    wrong = [hole["what"] for hole in diagnosis["missing"] if hole["what"].startswith("stacks of pid")]
    assert wrong == [f"stacks of pid {pid}" for pid in fake.pids]


@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_in_mid_window_ends_everything(
    to_group: bool, fake: fakes.Fake, tool: Tool, tmp_path: Path, eventually: Any
) -> None:
    tool.py_spy("exec /bin/sleep 3600")
    with tool.start("diagnose", fake.api, "--window", 600) as child:
        try:
            helpers = eventually(lambda: len(below := fakes.descendants(child.pid)) >= len(fake.pids) and below)
            for pid in (*(helpers if to_group else ()), child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert (child.returncode, out, err) == (130, "", "")
    assert not any(map(fakes.alive, helpers))


def test_a_port_that_never_answers_is_a_timeout(children: Any, tmp_path: Path) -> None:
    silent = fakes.start(children, tmp_path, answers=dict.fromkeys(("/health", "/version", "/metrics")))
    (probe,) = look(silent).http
    assert (probe.path, probe.status, probe.error) == ("/health", None, "timeout")


def test_metrics_that_never_answer_are_missed_once(children: Any, tmp_path: Path) -> None:
    snapshot = look(fakes.start(children, tmp_path, answers={"/metrics": None}))
    assert [probe.path for probe in snapshot.http] == ["/health", "/version"]
    assert what_is_missing(snapshot).count("metrics of port") == 1


def test_a_server_that_speaks_tls_is_no_fault(children: Any, tmp_path: Path) -> None:
    alert = "\x15\x03\x01\x00\x02\x02\x46"
    (probe,) = look(fakes.start(children, tmp_path, answers={"/health": alert})).http
    assert (probe.status, probe.error) == (None, "tls")


@pytest.mark.parametrize(
    "page",
    [
        "HTTP/1.1 200 OK\r\n\r\n" + 'vllm:num_requests_running{engine="0",model_name="' + '\\"' * 20_000,
        "HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_running NaN\nvllm:prompt_tokens_total 1e999\n\xff\xfe {}{}} 1 1\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffff\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        "HTTP/1.1 " + "9" * 100_000,
    ],
    ids=["endless label", "not a number", "endless chunk", "endless body", "endless status"],
)
def test_hostile_metrics_do_no_harm(page: str, children: Any, tmp_path: Path) -> None:
    snapshot = look(fakes.start(children, tmp_path, answers={"/metrics": page}))
    assert set(snapshot.target_pids)
    json.dumps([s.values for s in snapshot.metrics], allow_nan=False)
    assert snapshot.metrics or "metrics of port" in what_is_missing(snapshot)


@pytest.mark.needs("root")
def test_the_owner_of_the_processes_sees_all_that_it_may(children: Any, tmp_path: Path, as_nobody: Any) -> None:
    mine = fakes.start(children, tmp_path, "--as-uid", "65534")
    snapshot = as_nobody(lambda: look(mine))
    assert snapshot.viewer is not None
    assert snapshot.viewer.access == "same-uid"
    for process in (p for p in snapshot.processes if p.pid in mine.pids):
        assert not isinstance(process.shm_fds, Missing)
        assert not isinstance(process.exe, Missing)


@pytest.mark.needs("root")
def test_another_user_is_told_what_is_missing_and_never_that_all_is_well(fake: fakes.Fake, as_nobody: Any) -> None:
    snapshot = as_nobody(lambda: look(fake))
    diagnosis = diagnose(snapshot)
    assert diagnosis.verdict.status == "unknown"
    assert all(hole.next for hole in diagnosis.missing)
    assert f"stacks of pid {fake.engine}" in what_is_missing(snapshot)


@pytest.mark.needs("root")
def test_another_user_still_names_a_stopped_engine(fake: fakes.Fake, as_nobody: Any, eventually: Any) -> None:
    os.kill(fake.engine, signal.SIGSTOP)
    eventually(lambda: " T " in Path(f"/proc/{fake.engine}/stat").read_text())
    verdict = diagnose(as_nobody(lambda: look(fake))).verdict
    assert (verdict.status, verdict.cause, verdict.subject.pid) == ("critical", "process-stopped", fake.engine)

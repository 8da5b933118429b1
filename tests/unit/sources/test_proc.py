from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.sources.recorded import never_answers, record
from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process
from vllmdiag.sources import proc

NAP = "import time; print('ready', flush=True); time.sleep(600)"
OVERWRITE = """
import ctypes, time
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
start, end = int(fields[45]), int(fields[46])
ctypes.memset(start, {fill}, end - start - 1)
ctypes.memmove(start, b'VLLM::Worker_TP0', 16)
print('ready', flush=True)
time.sleep(600)
"""
NAME = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0)
print('ready', flush=True)
time.sleep(600)
"""
TRACED = """
import ctypes, time
ctypes.CDLL(None).ptrace(0, 0, 0, 0)
print('ready', flush=True)
time.sleep(600)
"""
THREADS = """
import ctypes, threading, time
started = threading.Barrier(3)
def run(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    started.wait()
    time.sleep(600)
for name in (b'one', b'two'):
    threading.Thread(target=run, args=(name,), daemon=True).start()
started.wait()
print('ready', flush=True)
time.sleep(600)
"""
STORM = """
import os, time
print('ready', flush=True)
alive = 0
while True:
    if os.fork() == 0:
        time.sleep(0.02)
        os._exit(0)
    alive += 1
    while alive > 20:
        os.wait()
        alive -= 1
"""


def scanned(pid: int) -> Process:
    return next(process for process in proc.scan() if process.pid == pid)


def test_a_scan_knows_the_identity_of_this_process() -> None:
    me = scanned(os.getpid())
    assert (me.ppid, me.pgid, me.sid, me.uid) == (os.getppid(), os.getpgrp(), os.getsid(0), os.geteuid())
    assert me.comm == Path("/proc/self/comm").read_text().strip()
    assert me.cmdline == tuple(Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"))
    assert me.nspids[0] == os.getpid()
    assert me.tracer_pid == 0
    assert not me.sigkill_pending
    assert me.samples[0].rss > 0
    assert me.age_s is not None
    assert me.age_s >= 0


def test_a_scan_lists_what_psutil_lists() -> None:
    before = set(psutil.pids())
    found = {process.pid for process in proc.scan()}
    after = set(psutil.pids())
    assert before & after <= found


def test_a_stopped_process_is_t_and_an_unreaped_one_z(children: Any, eventually: Any) -> None:
    pid, _ = children.python(NAP)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: scanned(pid).state == "T")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: scanned(pid).state == "Z")
    assert scanned(pid).cmdline == ()
    assert scanned(pid).title.startswith("[")


@pytest.mark.parametrize("fill", [0, 32])
def test_a_title_written_over_argv_is_one_element_without_padding(children: Any, fill: int) -> None:
    pid, _ = children.python(OVERWRITE.format(fill=fill))
    assert scanned(pid).cmdline == ("VLLM::Worker_TP0",)


def test_a_comm_with_brackets_and_spaces_does_not_shift_the_fields(children: Any) -> None:
    pid, _ = children.python(NAME)
    process = scanned(pid)
    assert process.comm == "a) R 1 (b"
    assert process.ppid == os.getpid()


def test_a_traced_process_names_its_tracer(children: Any) -> None:
    pid, _ = children.python(TRACED)
    assert scanned(pid).tracer_pid == os.getpid()


@pytest.mark.needs("root", "unshare")
def test_a_process_in_a_pid_namespace_has_a_pid_in_each(children: Any) -> None:
    parent, _ = children.python(NAP, under=("unshare", "--pid", "--fork", "--kill-child"))
    inner = next(process for process in proc.scan() if process.ppid == parent)
    assert inner.nspids == (inner.pid, 1)


def test_a_storm_of_forks_neither_breaks_a_scan_nor_mixes_two_processes(children: Any, eventually: Any) -> None:
    storm, _ = children.python(STORM)
    parent = scanned(storm)
    born = set()

    def scan_and_compare() -> bool:
        found = {process.pid: process for process in proc.scan()}
        assert (found[storm].starttime, found[storm].cmdline) == (parent.starttime, parent.cmdline)
        for child in found.values():
            if child.ppid == storm:
                born.add((child.pid, child.starttime))
                assert child.cmdline in (parent.cmdline, ())
                assert child.starttime >= parent.starttime
                assert child.sid == parent.sid
        return len(born) > 100

    eventually(scan_and_compare)


def scanned_start(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[19])


def test_a_sample_of_a_dead_or_reused_pid_has_no_state(children: Any, eventually: Any) -> None:
    pid, _ = children.python(NAP)
    start = scanned_start(pid)
    eventually(lambda: proc.sample(pid, start, 1.5).state == "S")
    assert proc.sample(pid, start, 1.5).t == 1.5
    assert proc.sample(pid, start + 1, 2.0).state == ""
    children.end(pid)
    assert proc.sample(pid, start, 3.0).state == ""
    assert proc.sample_threads(pid, 3.0) == {}


def test_cpu_time_of_a_busy_process_grows(children: Any, eventually: Any) -> None:
    pid, _ = children.python("print('ready', flush=True)\nwhile True: pass")
    start = scanned_start(pid)
    first = proc.sample(pid, start, 0.0)
    eventually(lambda: proc.sample(pid, start, 1.0).utime > first.utime)


def test_every_thread_is_sampled_under_its_kernel_name(children: Any) -> None:
    pid, _ = children.python(THREADS)
    threads = proc.sample_threads(pid, 2.5)
    assert pid in threads
    assert {"one", "two"} <= {name for name, _ in threads.values()}
    assert all(sample.t == 2.5 and sample.state for _, sample in threads.values())


@pytest.mark.needs("root")
def test_another_user_sees_the_state_but_not_the_io(children: Any, as_nobody: Any, eventually: Any) -> None:
    pid, _ = children.python(NAP)
    eventually(lambda: scanned(pid).state == "S")
    sample = as_nobody(lambda: proc.sample(pid, scanned_start(pid), 0.0))
    assert sample.state == "S"
    assert (sample.read_bytes, sample.rchar) == (None, None)
    assert proc.sample(pid, scanned_start(pid), 0.0).rchar is not None
    titles = as_nobody(lambda: {process.pid: process.cmdline for process in proc.scan()})
    assert titles[pid][0] == sys.executable


def test_a_recorded_tree_replays(tmp_path: Path) -> None:
    record(tmp_path, 12, cmdline=b"VLLM::EngineCore\0\0\0\0", starttime=4200)
    record(tmp_path, 13, shdpnd="0000000000000100", state="D", ppid=12)
    record(tmp_path, 14, sigpnd="0000000000004100")
    (tmp_path / "proc" / "uptime").write_text("100.00 1.0\n")
    engine, worker, other = proc.scan(str(tmp_path))
    assert engine.title == "VLLM::EngineCore"
    assert (engine.uid, engine.nspids, engine.starttime, engine.age_s) == (1001, (12, 7), 4200, 58.0)
    assert (engine.samples[0].utime, engine.samples[0].stime) == (2.5, 0.5)
    assert not engine.sigkill_pending
    assert worker.sigkill_pending
    assert other.sigkill_pending
    assert (worker.state, worker.ppid) == ("D", 12)
    assert proc.sample(12, 4200, 0.0, str(tmp_path)).state == "S"


def test_a_command_line_that_never_answers_is_missing_and_the_rest_known(tmp_path: Path) -> None:
    stuck = record(tmp_path, 20, state="D", comm="worker")
    never_answers(stuck, "cmdline")
    record(tmp_path, 21)
    first, second = proc.scan(str(tmp_path))
    assert isinstance(first.cmdline, Missing)
    assert first.cmdline.why.startswith("ETIMEDOUT")
    assert first.missing == (first.cmdline,)
    assert (first.state, first.comm) == ("D", "worker")
    assert second.cmdline == ("python3", "-c", "x")


def test_a_tree_without_proc_has_no_processes(tmp_path: Path) -> None:
    assert proc.scan(str(tmp_path)) == []

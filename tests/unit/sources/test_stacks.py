"""Stacks of real Pythons in every state by the real py-spy, and what is said where there are none."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.base import Missing
from vllmdiag.model.errors import BadDataError, UsageError
from vllmdiag.model.process import Frame, ThreadStack
from vllmdiag.sources import helper
from vllmdiag.sources.stacks import StackSampler, find_py_spy, parse_py_spy_json

HELPED = """
import threading, sys
def linger():
    threading.Event().wait()
def main():
    print("ready", flush=True)
    sys.stdin.read()
threading.Thread(target=linger, name="helper", daemon=True).start()
main()
"""
PR_CAPBSET_DROP = 24


def dump_of(pid: int, sampler: StackSampler | None = None) -> tuple[ThreadStack, ...] | Missing:
    return (sampler or StackSampler([pid])).dump(0.0)[pid].threads


def stacks_of(pid: int) -> tuple[ThreadStack, ...]:
    threads = dump_of(pid)
    assert not isinstance(threads, Missing), threads
    return threads


def why_none(pid: int, sampler: StackSampler | None = None) -> str:
    threads = dump_of(pid, sampler)
    assert isinstance(threads, Missing), threads
    assert threads.what == f"stacks of pid {pid}"
    assert threads.next
    return threads.why


def last_word(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A writer of small shell programs that stand in for py-spy."""

    def write(text: str) -> str:
        path = tmp_path / "py-spy"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return str(path)

    return write


def test_py_spy_is_found_beside_this_interpreter() -> None:
    assert find_py_spy() == shutil.which("py-spy", path=os.path.dirname(sys.executable))


def test_without_py_spy_the_stacks_are_missing_and_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = find_py_spy()
    assert isinstance(absent, Missing)
    assert dump_of(os.getpid()) == absent


def test_the_main_thread_comes_first_and_its_innermost_frame_is_first(children: Any) -> None:
    pid, _ = children.python(HELPED)
    main, aside = stacks_of(pid)
    assert (main.name, main.tid, aside.name) == ("MainThread", pid, "helper")
    assert [last_word(frame) for frame in main.frames] == ["main", "<module>"]
    assert "linger" in [last_word(frame) for frame in aside.frames]
    assert aside.tid in [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    assert {frame.file for frame in aside.frames} == {"<string>", "threading.py"}
    assert HELPED.splitlines()[main.frames[0].line - 1].strip() == "sys.stdin.read()"


def test_a_stopped_process_is_read_and_stays_stopped(children: Any) -> None:
    pid, _ = children.python(HELPED)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert [last_word(frame) for frame in stacks_of(pid)[0].frames] == ["main", "<module>"]
    assert state_of(pid) == "T"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_busy_process_is_never_traced(children: Any) -> None:
    pid, _ = children.python("print('ready', flush=True)\nwhile True: pass")
    sampler = StackSampler([pid])
    for t in (0.0, 1.0):
        dump = sampler.dump(t)[pid]
        assert not isinstance(dump.threads, Missing)
        assert dump.t >= t
        assert dump.took_s > 0
        assert "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text()


def test_what_is_dead_or_no_python_is_asked_once(
    children: Any, eventually: Callable[[Callable[[], Any]], Any], tmp_path: Path, program: Callable[[str], str]
) -> None:
    zombie = children.program("true").pid
    eventually(lambda: state_of(zombie) == "Z")
    sleeper = children.program("sleep", "600").pid
    count = tmp_path / "count"
    counting = program(f'echo "$@" >> {count}\nexec {find_py_spy()} "$@"\n')
    sampler = StackSampler([zombie, sleeper, 2**22 + 1], py_spy=counting)
    for t in (0.0, 1.0):
        dumps = sampler.dump(t)
        assert list(dumps) == [zombie, sleeper, 2**22 + 1]
        whys = [dump.threads.why for dump in dumps.values() if isinstance(dump.threads, Missing)]
        assert whys == [
            "the process is a zombie",
            "py-spy finds no Python interpreter in it",
            "the process has ended",
        ]
    assert count.read_text() == f"dump --json --nonblocking --pid {sleeper}\n"


def test_a_process_that_ends_within_the_dump_is_gone_not_garbled(children: Any, program: Callable[[str], str]) -> None:
    pid, _ = children.python(HELPED)
    killing = program(f"kill -9 {pid}; echo 'Error: Failed to copy PyThreadState' >&2; exit 1\n")
    assert why_none(pid, StackSampler([pid], py_spy=killing)) == "the process is a zombie"


@pytest.mark.needs("root")
def test_another_user_is_refused_and_told_what_would_help(
    children: Any, as_nobody: Callable[[Callable[[], Any]], Any]
) -> None:
    pid, _ = children.python(HELPED)
    found = find_py_spy()
    assert isinstance(found, str)
    with tempfile.TemporaryDirectory() as directory:  # everybody must be able to reach and run it
        os.chmod(directory, stat.S_IRWXU | stat.S_IXOTH | stat.S_IROTH)
        program = shutil.copy(found, directory)
        threads = as_nobody(lambda: dump_of(pid, StackSampler([pid], py_spy=program)))
    assert threads.why.startswith("EACCES: py-spy may not read the process")
    assert "CAP_SYS_PTRACE" in threads.next


@pytest.mark.needs("root")
def test_root_without_the_capability_is_refused(children: Any) -> None:
    pid, _ = children.python(HELPED)
    libc = ctypes.CDLL(None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for capability in range(64):  # what is left out of this set, py-spy cannot have
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            os.write(writer, why_none(pid).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read().startswith(b"EACCES: py-spy may not read the process")
    os.waitpid(child, 0)


@pytest.mark.needs("root", "unshare")
def test_threads_in_another_pid_namespace_have_the_ids_that_we_see(children: Any) -> None:
    outer = children.program("unshare", "-p", "--fork", "--kill-child", sys.executable, "-S", "-c", HELPED)
    assert children.line(outer.pid) == "ready"
    pid = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
    main, aside = stacks_of(pid)
    assert (main.name, main.tid) == ("MainThread", pid)
    assert str(aside.tid) in os.listdir(f"/proc/{pid}/task")


def test_a_helper_that_hangs_is_killed_and_the_dump_is_late(
    children: Any, tmp_path: Path, program: Callable[[str], str]
) -> None:
    pid, _ = children.python(HELPED)
    mine = tmp_path / "pid"
    hanging = program(f"echo $$ > {mine}\nexec sleep 600\n")
    why = why_none(pid, StackSampler([pid], deadline_s=0.5, py_spy=hanging))
    assert why == "late: py-spy gave no answer within 0.5 s (process state S)"
    with pytest.raises(ProcessLookupError):
        os.kill(int(mine.read_text()), 0)


def test_one_that_hangs_does_not_hold_up_the_others(children: Any, program: Callable[[str], str]) -> None:
    stuck, fine = children.python(HELPED)[0], children.python(HELPED)[0]
    some = program(f'case "$*" in *" {stuck}") exec sleep 600;; esac\nexec {find_py_spy()} "$@"\n')
    dumps = StackSampler([stuck, fine], deadline_s=5.0, py_spy=some).dump(0.0)
    assert isinstance(dumps[stuck].threads, Missing)
    assert not isinstance(dumps[fine].threads, Missing)


def test_garbled_reads_are_repeated_and_a_good_one_counts(
    children: Any, tmp_path: Path, program: Callable[[str], str]
) -> None:
    pid, _ = children.python(HELPED)
    tries = tmp_path / "tries"
    third = program(
        f"echo x >> {tries}\n"
        f"case $(wc -l < {tries}) in\n"
        '1) echo "Error: Failed to copy PyCodeObject" >&2; exit 1;;\n'
        '2) echo "[]"; exit;;\n'
        "esac\n"
        f'exec {find_py_spy()} "$@"\n'
    )
    assert not isinstance(dump_of(pid, StackSampler([pid], py_spy=third)), Missing)
    assert tries.read_text() == "x\n" * 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: Invalid address' >&2; echo 'Stack backtrace:' >&2; exit 1", "py-spy failed: Invalid address"),
        ("echo '[]'", "py-spy read only empty stacks"),
        ("echo 'not json'", "py-spy: JSON is malformed"),
        ("yes | head -c 20000000", "py-spy wrote more than 16 MiB"),
    ],
)
def test_a_read_that_stays_garbled_is_missing(
    children: Any, program: Callable[[str], str], text: str, why: str
) -> None:
    pid, _ = children.python(HELPED)
    assert why_none(pid, StackSampler([pid], py_spy=program(text))).startswith(why)


def test_a_program_that_cannot_be_started_is_missing(children: Any, tmp_path: Path) -> None:
    pid, _ = children.python(HELPED)
    assert why_none(pid, StackSampler([pid], py_spy=str(tmp_path / "none"))).startswith("ENOENT")


@pytest.mark.parametrize("mode", [{"native": True}, {"blocking": True}])
def test_a_stopped_process_is_never_paused(children: Any, mode: dict[str, bool]) -> None:
    pid, _ = children.python(HELPED)
    sampler = StackSampler([pid], **mode)  # type: ignore[arg-type]
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    with pytest.raises(UsageError, match=f"will not pause pid {pid}"):
        sampler.dump(0.0)


def test_the_pausing_mode_reads_a_running_process(children: Any) -> None:
    pid, _ = children.python(HELPED)
    threads = dump_of(pid, StackSampler([pid], blocking=True))
    assert not isinstance(threads, Missing)
    assert threads[0].tid == pid


def test_a_late_helper_and_its_output_are_bounded() -> None:
    late = helper.run(["sh", "-c", "echo begun; exec sleep 600"], time.monotonic() + 0.3, 1000)
    assert (late.code, late.out, late.late, late.too_much) == (None, b"begun\n", True, False)
    loud = helper.run(["yes"], time.monotonic() + 60, 1000)
    assert (loud.code, loud.late, loud.too_much) == (None, False, True)
    done = helper.run(["sh", "-c", "echo out; echo err >&2; exit 3"], time.monotonic() + 60, 1000)
    assert done == helper.Output(3, b"out\n", b"err\n")


def test_a_helper_that_has_ended_is_not_waited_for_when_another_holds_its_pipe() -> None:
    done = helper.run(["sh", "-c", "sleep 600 & echo $!"], time.monotonic() + 60, 1000)
    os.kill(int(done.out), signal.SIGKILL)  # it was still there
    assert (done.code, done.late) == (0, False)


def test_paths_are_shortened_even_where_py_spy_did_not() -> None:
    frames = [
        {"name": "a", "filename": "/opt/v/lib/python3.12/site-packages/vllm/v1/engine/core.py", "line": 3},
        {"name": "b", "filename": "/usr/lib/python3/dist-packages/x.py", "short_filename": None, "line": 4},
        {"name": "c", "filename": "/long/y.py", "short_filename": "y.py", "line": 5},
    ]
    (thread,) = parse_py_spy_json(json.dumps([{"pid": 7, "os_thread_id": 7, "frames": frames}]).encode())
    assert [frame.file for frame in thread.frames] == ["vllm/v1/engine/core.py", "x.py", "y.py"]
    assert thread.name == "MainThread"


@given(st.binary())
def test_bytes_that_are_no_dump_are_bad_data_and_nothing_else(data: bytes) -> None:
    with pytest.raises(BadDataError):
        parse_py_spy_json(b"{" + data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["frames", "name", "pid"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_json_of_any_shape_is_a_dump_or_bad_data(value: Any) -> None:
    with suppress(BadDataError):
        assert len(parse_py_spy_json(json.dumps(value).encode())) == len(value)


def test_json_nested_without_end_is_bad_data() -> None:
    with pytest.raises(BadDataError):
        parse_py_spy_json(b'[{"x":' + b"[" * 100_000)

"""What a default `diagnose` does to a live vLLM, by its system calls: nothing that changes, pauses or wakes anybody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.server import Server

_CHANGES = re.findall(
    r"\w+",
    """
    unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat mknod mknodat
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat truncate ftruncate fallocate
    utimensat utime utimes futimesat setxattr fsetxattr lsetxattr removexattr mount umount2 pivot_root
    sched_setaffinity sched_setscheduler sched_setattr sched_setparam setpriority ioprio_set
    ptrace process_vm_writev process_madvise process_mrelease move_pages migrate_pages
    shmget shmat shmctl semget msgget bpf perf_event_open listen accept accept4
    """,
)
_SIGNALS = ["kill", "tkill", "tgkill", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo"]
_OPENS = ["open", "openat", "openat2", "creat"]
_WRITES = ["write", "writev", "pwrite64", "pwritev", "pwritev2", "copy_file_range", "sendfile"]
_SENDS = ["sendto", "sendmsg", "sendmmsg"]
_LOOKED_AT = [*_SIGNALS, *_OPENS, *_WRITES, *_SENDS, "connect", "bind", "mmap", "mmap2", "prlimit64", "setns"]


class Call(NamedTuple):
    """One system call that was made."""

    pid: int
    name: str
    arguments: str


class Trace(NamedTuple):
    """One run under strace."""

    calls: tuple[Call, ...]
    diagnosis: Any

    def of(self, *names: str) -> list[Call]:
        """The calls with one of these names."""
        return [call for call in self.calls if call.name in names]


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    return {}


@pytest.fixture
def trace(server: Server, traces: dict[int, Trace], tmp_path: Path) -> Trace:
    """A default run on the idle server: one for all tests here."""
    if server.api not in traces:
        traces[server.api] = _run(server, tmp_path / "strace")
    return traces[server.api]


def _run(server: Server, log: Path) -> Trace:
    names = ",".join(f"?{name}" for name in (*_CHANGES, *_LOOKED_AT))
    strace = ["strace", "-f", "-yy", "-s", "200", "-e", f"trace={names}", "-e", "signal=none", "-o", str(log)]
    command = [sys.executable, "-m", "vllmdiag", "diagnose", str(server.api), "--format", "json"]
    # Python's own cache of compiled modules is no part of what is tested.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*strace, *command], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert not done.stderr
    return Trace(tuple(_calls(log.read_text(errors="replace"))), json.loads(done.stdout))


def _calls(text: str) -> Iterator[Call]:
    for line in text.splitlines():
        if found := re.match(r"(\d+) +(\w+)\((.*)", line):  # not the second half of one that was interrupted
            yield Call(int(found[1]), found[2], found[3])


pytestmark = pytest.mark.needs("strace")


def test_the_run_that_is_judged_here_saw_everything(trace: Trace, server: Server) -> None:
    verdict = trace.diagnosis["verdict"]
    assert (verdict["status"], verdict["cause"]) == ("ok", "idle")
    assert not trace.diagnosis["missing"]
    assert len(trace.of("openat")) > 1000
    assert trace.diagnosis["cost"]["processes_dumped"] == len(server.engines + server.workers + server.apis)


def test_no_call_changes_a_file_a_process_or_the_machine(trace: Trace) -> None:
    assert not trace.of(*_CHANGES)


def test_nothing_is_opened_for_writing(trace: Trace) -> None:
    opened = trace.of(*_OPENS)
    writable = [c for c in opened if c.name == "creat" or re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", c.arguments)]
    assert not [call for call in writable if '"/dev/null"' not in call.arguments]


def test_nothing_is_written_but_to_pipes_and_sockets(trace: Trace) -> None:
    written = trace.of(*_WRITES)
    assert written
    assert not [
        call for call in written if not re.match(r"\d+<(pipe:|socket:|TCP|NETLINK|anon_inode:)", call.arguments)
    ]


def test_the_only_peers_are_the_http_port_and_the_kernel(trace: Trace, server: Server) -> None:
    connects = [call.arguments for call in trace.of("connect") if "/nscd/socket" not in call.arguments]
    assert connects
    assert not [words for words in connects if f"sin_port=htons({server.port})" not in words]
    sent = [call.arguments for call in trace.of(*_SENDS) if "nscd" not in call.arguments]
    here = rf"\d+<(NETLINK:|TCP:\[127\.0\.0\.1:\d+->127\.0\.0\.1:{server.port}\])"
    assert not [words for words in sent if not re.match(here, words)]
    requests = {found[1] for words in sent if (found := re.search(r'"(\w+ /\S*) HTTP', words))}
    assert requests == {"GET /health", "GET /version", "GET /metrics"}
    assert not [call for call in trace.of("bind") if "AF_NETLINK" not in call.arguments]


def test_signals_go_to_its_own_helpers_alone(trace: Trace) -> None:
    own = {call.pid for call in trace.calls}
    sent = trace.of(*_SIGNALS)
    assert not [call for call in sent if int(re.findall(r"\d+", call.arguments)[0]) not in own]


def test_shared_memory_is_never_mapped(trace: Trace) -> None:
    mapped = trace.of("mmap", "mmap2")
    assert mapped
    assert not [call for call in mapped if "/dev/shm" in call.arguments]


def test_no_namespace_is_entered_and_no_limit_of_another_is_set(trace: Trace) -> None:
    assert not trace.of("setns")
    assert not [c for c in trace.of("prlimit64") if not re.match(r"0, \w+, NULL", c.arguments)]


def test_a_look_allocates_no_page_of_a_ring(server: Server, trace: Trace) -> None:
    def resident() -> dict[str, int]:
        return {path: os.stat(path).st_blocks for path in server.segments()}

    before = resident()
    assert before
    command = [sys.executable, "-m", "vllmdiag", "ring", str(server.api), "--peek", "--window", "1"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert resident() == before


def test_the_server_goes_on_undisturbed(server: Server, trace: Trace) -> None:
    assert not server.broken()
    assert server.request(max_tokens=4).result()[0] == 200

"""Small processes that look like vLLM from outside: `python .../vllm serve model --port N`, an engine, its workers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = r"""
import ctypes, json, os, signal, socket, sys, time

libc = ctypes.CDLL(None)
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))

def title(text):
    fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text.encode(), len(text))

def member(text, below=()):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test that kills the root kills them all
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda *_: member("VLLM::Worker_TP9"))
        server.close()
        title(text)
        pids = [os.getpid()] + [pid for one in below for pid in member(one)]
        os.write(writer, json.dumps(pids).encode())
        os.close(writer)
        waits_for_work()
    os.close(writer)
    pids = json.loads(os.read(reader, 4096))
    os.close(reader)
    return pids

def waits_for_work():
    while True:
        time.sleep(3600)

server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(options["--port"])))
server.listen()
if "--as-uid" in options:
    os.setgroups([])
    os.setgid(int(options["--as-uid"]))
    os.setuid(int(options["--as-uid"]))
    libc.prctl(4, 1)  # PR_SET_DUMPABLE, which a change of uid takes away
pids = [os.getpid(), *member("VLLM::EngineCore", ("VLLM::Worker_TP0", "VLLM::Worker_TP1"))]
print(json.dumps(pids), flush=True)
if "--run" in options and os.fork() == 0:
    os.execv("/bin/sh", ["sh", "-c", options["--run"]])
answers = json.loads(options.get("--answers", "{}"))
held = []
while True:
    peer, _ = server.accept()
    path = peer.recv(4096).decode("latin-1").split(" ")[1:2]
    answer = answers.get(path[0] if path else "", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    if answer is None:
        held.append(peer)
        continue
    try:
        peer.sendall(answer.encode("latin-1"))
    except OSError:
        pass
    peer.close()
"""


@dataclass(frozen=True)
class Fake:
    """One instance: the API server, then the engine, then its workers."""

    pids: tuple[int, ...]
    port: int

    @property
    def api(self) -> int:
        """The API server."""
        return self.pids[0]

    @property
    def engine(self) -> int:
        """The EngineCore."""
        return self.pids[1]


def start(
    children: Any,
    directory: Path,
    *more: str,
    answers: dict[str, str | None] | None = None,
    under: tuple[str, ...] = (),
) -> Fake:
    """Start one; it ends with the test.

    Args:
        children: the fixture.
        directory: where its program is written.
        more: further options, each with a value.
        answers: what is sent for a path; None: nothing, ever.
        under: a command that starts it, such as ``unshare ...``; the pids are then those of its own pid namespace.
    """
    program = directory / "vllm"
    program.write_text(PROGRAM)
    port = free_port()
    words = (str(program), "serve", "model", "--port", str(port), *more, "--answers", json.dumps(answers or {}))
    pids = json.loads(child_line(children, *under, sys.executable, "-S", *words, start_new_session=True))
    return Fake(tuple(pids), port)


def child_line(children: Any, *command: str, **options: Any) -> str:
    """Start a program and return its first line."""
    child = children.program(*command, **options)
    line: str = child.stdout.readline()
    assert line, "it died before it was ready"
    return line


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process with that pid exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid: int) -> set[int]:
    """The processes that one has started and that have not been reaped."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found |= set(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    below = children_of(pid)
    return below.union(*map(descendants, below))

"""A running lab: the processes of one miniature server, in process groups of their own, removed without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllmdiag
from vllmdiag.model.errors import ExitCode, UsageError, VllmdiagError

from . import client, lifeline, procs, switches

PREFIX = "vllmdiag-lab-"
_LONGEST_TMP = 107 - len(f"/{PREFIX}4194304-12345678/ipc/12345678-1234-1234-1234-123456789012")
"""A socket's path has at most 107 characters (unix(7))."""
_START_S = 60.0
_STOP_S = 3.0
_POLL_S = 0.02
_WATCH_S = 0.5
_PROGRAM = Path(__file__).parent / "bin" / "vllm"
_SHM = Path("/dev/shm")
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LabError(VllmdiagError):
    """A lab did not start, or a fault could not be put in place."""

    exit_code = ExitCode.TIMED_OUT


@dataclass(frozen=True)
class Shape:
    """What server to play."""

    tp: int = 2
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    version: str = "0.32.0"
    env: tuple[tuple[str, str], ...] = ()
    """More environment for all of its processes."""
    switches: tuple[tuple[str, str], ...] = ()
    """Switches that are on from the start: (name, for whom)."""
    private_shm: str = ""
    """Give it a /dev/shm of its own of this size (``1g``), in a mount namespace; needs root."""

    def problem(self) -> str:
        """Why there is no such server; empty where there is."""
        if self.nodes > 1 and (self.tp * self.pp) % self.nodes:
            return f"{self.tp * self.pp} ranks cannot be spread over {self.nodes} nodes"
        if self.nodes > 1 and self.dp > 1:
            return "the lab plays several engines or several nodes, not both"
        return ""


class Lab:
    """One server. A context manager: leaving it ends every process of it and removes every segment and file.

    Args:
        shape: what to start.

    Raises:
        UsageError: there is no such server, or no room for its sockets.
    """

    def __init__(self, shape: Shape, port: int | None = None) -> None:
        if problem := shape.problem():
            raise UsageError("the lab cannot play this server", why=problem, next="vllmdiag lab up --help")
        self.shape = shape
        if len(tempfile.gettempdir()) > _LONGEST_TMP:
            raise UsageError(
                "the temporary directory has too long a path for sockets in it",
                why=f"{tempfile.gettempdir()} has more than {_LONGEST_TMP} characters",
                next="TMPDIR=/tmp vllmdiag lab ...",
            )
        self.work = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._lifeline = lifeline.hold(self.work)
        free, self._master_port = _free_ports(2)
        self.port = port if port is not None else free
        self._roots: list[subprocess.Popen[bytes]] = []
        self._segments: set[str] = set()
        self._handlers: dict[signal.Signals, Any] = {}
        self.cleanup = ExitStack()
        """Undoes, when the lab goes down, what a fault has made outside of the server."""
        (self.work / "ipc").mkdir()
        for name, whom in shape.switches:
            switches.turn_on(name, whom, self.work)
        try:
            for node in range(shape.nodes):
                self._launch(node)
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Lab:  # noqa: PYI034 (Self needs Python 3.11)
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, _interrupt) for number in _ENDS}
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
        self.down()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # --- up and down

    def _launch(self, node: int) -> None:
        shape = self.shape
        words = [sys.executable, str(_PROGRAM), "serve", "lab/tiny", "--port", str(self.port)]
        for option, value in (
            ("tensor-parallel-size", shape.tp),
            ("pipeline-parallel-size", shape.pp),
            ("data-parallel-size", shape.dp),
        ):
            words += [f"--{option}", str(value)] if value > 1 else []
        if shape.nodes > 1:
            words += ["--nnodes", str(shape.nodes), "--node-rank", str(node)]
            words += ["--master-addr", "127.0.0.1", "--master-port", str(self._master_port)]
            words += ["--headless"] if node else []
        env = {
            **os.environ,
            lifeline.ENV: str(self.work),
            "PYTHONPATH": os.pathsep.join([str(Path(vllmdiag.__file__).parents[1]), *_old_path()]),
            "TMPDIR": str(self.work / "ipc"),
            "VLLM_RPC_BASE_PATH": str(self.work / "ipc"),
            "VLLM_HOST_IP": f"127.0.0.{1 + node}",
            "VLLMDIAG_LAB_VERSION": shape.version,
            **dict(shape.env),
        }
        with (self.work / f"node{node}.log").open("wb") as log:
            self._roots.append(
                subprocess.Popen(
                    [*_wrapping(shape), *words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def wait_ready(self) -> None:
        """Wait until it answers /health.

        Raises:
            LabError: it ended, or did not answer in a minute; the message ends with its log.
        """
        self.wait_for("the lab answers /health", lambda: client.status(self.port, "/health") == 200, _START_S)

    def wait_for(self, what: str, reached: Callable[[], object], deadline_s: float = 20.0) -> None:
        """Wait for a condition. Raises LabError when it is not reached in time, or the server has ended meanwhile."""
        end = time.monotonic() + deadline_s
        while not reached():
            ended = all(root.poll() is not None for root in self._roots) and not self.processes()
            if ended or time.monotonic() > end:
                why = "the server has ended" if ended else f"not within {deadline_s:g} s"
                raise LabError(f"waiting in vain until {what}", why=f"{why}\n{self.log_tail()}", next="run it again")
            time.sleep(_POLL_S)

    def watch(self) -> None:
        """Wait until everything of it has ended, or for ever."""
        while self.processes():
            self.reap()
            time.sleep(_WATCH_S)

    def down(self) -> None:
        """End it: by SIGTERM where it listens to that, by SIGKILL where it does not. Nothing of it is left."""
        try:
            self.cleanup.close()
        finally:
            self._end()

    def _end(self) -> None:
        self.note_segments()
        for root in self._roots:
            with suppress(ProcessLookupError):
                os.kill(root.pid, signal.SIGTERM)
        end = time.monotonic() + _STOP_S
        while self.processes() and time.monotonic() < end and not self._stuck():
            time.sleep(_POLL_S)
            for root in self._roots:
                root.poll()
        self.note_segments()
        os.close(self._lifeline)
        for root in self._roots:
            with suppress(ProcessLookupError):
                os.killpg(root.pid, signal.SIGKILL)
            root.wait()
        while self.processes():
            time.sleep(_POLL_S)
        for name in self._segments:
            (_SHM / name).unlink(missing_ok=True)
        shutil.rmtree(self.work)

    def _stuck(self) -> bool:
        """Whether a process that would have to take part in an orderly end cannot."""
        return any(p.state in "TDZ" for p in self.processes().values()) or self._roots[0].poll() is not None

    def kill_all(self) -> None:
        """SIGKILL to everything at once, the resource tracker too: what a crash of the node's memory leaves."""
        for root in self._roots:
            os.killpg(root.pid, signal.SIGKILL)
            root.wait()
        while self.processes():
            time.sleep(_POLL_S)

    # --- what is there

    @property
    def root(self) -> int:
        """The process that was launched for the first node."""
        return self._roots[0].pid

    def processes(self) -> dict[int, procs.Proc]:
        """Every process of its groups, orphans too. A zombie counts only while its parent is one of them."""
        groups = {root.pid for root in self._roots}
        found = {p.pid: p for p in procs.scan() if p.pgid in groups}
        return {p.pid: p for p in found.values() if p.state != "X" and (p.state != "Z" or p.ppid in found)}

    def pid(self, name: str) -> int:
        """The process of a role: ``APIServer`` (or ``Launcher``), or the end of a title such as ``Worker_TP1``.

        Raises:
            LabError: there is none.
        """
        if name in ("APIServer", "Launcher"):
            return self.root
        found = [p.pid for p in self.processes().values() if p.title == f"VLLM::{name}"]
        if not found:
            raise LabError(f"the lab has no {name}", why=f"it has {self.describe()}", next="vllmdiag lab faults")
        return min(found)

    def describe(self) -> str:
        """Its processes by title and pid, in one line."""
        return ", ".join(f"{p.title or 'vllm serve'} {p.pid}" for p in self.processes().values())

    def note_segments(self) -> set[str]:
        """Remember which files of /dev/shm it holds now, to remove them at the end; returns all noted so far."""
        for pid in self.processes():
            self._segments |= procs.segments(pid)
        return self._segments

    def flags(self) -> dict[tuple[int, str], bytes]:
        """The last bytes of every ring, by process and name: they change with every message."""
        return {(pid, name): tail for pid in self.processes() for name, tail in procs.tails(pid)}

    def running(self) -> int:
        """Requests that the API server counts as running; 0 where it does not answer."""
        text = client.text(self.port, "/metrics")
        return sum(int(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))

    def reap(self) -> bool:
        """Take the exit status of launched processes that have ended; whether the first one has."""
        codes = [root.poll() for root in self._roots]
        return codes[0] is not None

    def log_tail(self, lines: int = 12) -> str:
        """The end of what it has printed."""
        texts = [path.read_text(errors="replace") for path in sorted(self.work.glob("node*.log"))]
        return "\n".join("\n".join(texts).splitlines()[-lines:])

    # --- work for it

    def request(self, max_tokens: int = 4, **more: object) -> client.Call:
        """A completion, in the background."""
        return self._call("/v1/completions", {"prompt": "lab", "max_tokens": max_tokens, **more})

    def rpc(self, method: str, *args: object, timeout: float | None = None) -> client.Call:
        """A collective RPC, in the background."""
        return self._call("/collective_rpc", {"method": method, "args": args, "timeout": timeout})

    def _call(self, path: str, body: dict[str, object]) -> client.Call:
        call = client.Call(self.port, path, json.dumps(body))
        self.cleanup.callback(call.cancel)
        return call


def _interrupt(*_: object) -> None:
    """Whatever ends a program ends a lab as Ctrl-C does: orderly. Also where a shell has told us to ignore SIGINT."""
    raise KeyboardInterrupt


def _wrapping(shape: Shape) -> list[str]:
    """Programs around the server that give it what the fault needs."""
    words = []
    if shape.private_shm:
        mount = f'mount -t tmpfs -o size={shape.private_shm} tmpfs /dev/shm && exec "$@"'
        words += ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    return words


def _old_path() -> list[str]:
    return [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


def _free_ports(n: int) -> list[int]:
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()

"""A real vLLM under test: started in its own sessions and directory, known by /proc alone, removed without a trace."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import procs
from .client import Call, Load, completion, deaf, get
from .procs import Proc
from .setup_vllm import Installation, ensure
from .topologies import TOPOLOGIES, Topology
from .waiting import wait_until

INSIDE = Path(__file__).parent / "inside"
START_DEADLINE_S = 240.0


class StartError(RuntimeError):
    """The server ended or did not become ready; the message ends with the tail of its log."""


class Server:
    """One topology, running. A context manager: leaving it removes every process, segment and file.

    Args:
        topology: a name of `TOPOLOGIES`, or a row of one's own.
        args: more arguments for every ``vllm serve``.
        env: more environment for every process.
        shm_size: give each node a /dev/shm of its own of this size (``64m``), in a private mount namespace.
        nofile: soft and hard limit of open files.
        only: start only these nodes of the topology (a peer that never comes).
        under: a command that starts each node (``unshare ...``).
        model: a model of one's own instead of the tiny one.
    """

    def __init__(
        self,
        topology: str | Topology = "tp2",
        *,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        shm_size: str | None = None,
        nofile: int | None = None,
        only: tuple[int, ...] | None = None,
        under: tuple[str, ...] = (),
        model: str | None = None,
        installation: Installation | None = None,
    ) -> None:
        self.topology = TOPOLOGIES[topology] if isinstance(topology, str) else topology
        self.installation = installation or ensure()
        self.model = model or str(self.installation.moe if self.topology.moe else self.installation.tiny)
        self.marker = f"vllmdiag-test-{uuid.uuid4().hex}"
        self.work = Path(tempfile.mkdtemp(prefix="vllmdiag-"))
        self.uds = self.work / "http.sock"
        self.port, self._port_a, self._port_b = free_ports(3)
        self.nodes = only if only is not None else tuple(range(len(self.topology.nodes)))
        self.started_in_s = 0.0
        """Seconds that `wait_ready` waited."""
        self.spoiled = ""
        """Why no other test may use it."""
        self._segments: dict[str, int] = {}
        self._sockets: set[str] = set()
        self._roots: list[subprocess.Popen[bytes]] = []
        self._wrap = [*under, *_wrapper(shm_size, nofile)]
        (self.work / "ipc").mkdir()
        (self.work / "tmp").mkdir()
        try:
            for node in self.nodes:
                self._launch(node, args, env or {})
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Server:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- starting

    def _launch(self, node: int, args: tuple[str, ...], env: dict[str, str]) -> None:
        topology, bin_dir = self.topology, self.installation.root / "bin"
        if topology.offline_tp is not None:
            command = [str(bin_dir / "python"), str(INSIDE / "offline.py"), self.model, str(topology.offline_tp)]
            command.append(str(self.work / "ready"))
        else:
            places = {"port_a": self._port_a, "port_b": self._port_b}
            command = [str(bin_dir / "vllm"), "serve", self.model, "--load-format", "dummy", "--enforce-eager"]
            command += ["--max-model-len", "2048", "--worker-extension-cls", "labext.LabExt"]
            command += ["--uds", str(self.uds)] if topology.uds else ["--host", "127.0.0.1", "--port", str(self.port)]
            command += [arg.format(**places) for arg in topology.nodes[node]] + list(args)
        with self.log(node).open("wb") as log:
            root = subprocess.Popen(
                [*self._wrap, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.work,
                env=self._environment(node, env),
                start_new_session=True,
            )
        self._roots.append(root)
        # Its workers spin; where the kernel shares the processors by session, the tests would hardly get any.
        with suppress(OSError):
            Path(f"/proc/{root.pid}/autogroup").write_text("19")

    def _environment(self, node: int, more: dict[str, str]) -> dict[str, str]:
        cpus = sorted(os.sched_getaffinity(0))
        local = self.topology.workers // len(self.topology.nodes)
        binds = "|".join(str(cpus[(node * local + i) % len(cpus)]) for i in range(local))
        python_path = [INSIDE, *([INSIDE / "forkplugin"] if self.topology.plugin else [])]
        kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "LD_LIBRARY_PATH")}
        return {
            **kept,
            "PATH": f"{self.installation.root / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, python_path)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.work / "tmp"),  # ZMQ's socket files go here: vLLM leaves them behind
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CACHE_ROOT": str(self.installation.compiled / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.installation.compiled / "inductor"),
            "VLLM_SERVER_DEV_MODE": "1",  # POST /collective_rpc
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB for each worker
            "VLLM_CPU_OMP_THREADS_BIND": binds,  # automatic binding refuses more workers than cores
            "VLLM_RINGBUFFER_WARNING_INTERVAL": "5",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            **{key: value.format(work=self.work) for key, value in self.topology.env.items()},
            **more,
            "VLLMDIAG_TEST_ID": self.marker,
        }

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> Server:
        """Wait until it serves (or, offline, has answered its first prompt).

        Raises:
            StartError: a node ended, or the deadline passed.
        """
        began = time.monotonic()

        def ready() -> bool:
            self.record()
            if any(root.poll() is not None for root in self._roots):
                raise StartError(f"{self.topology.name} ended while starting\n{self.log_tail()}")
            return self.healthy()

        try:
            wait_until(f"{self.topology.name} is ready", ready, deadline_s, every_s=0.25)
        except TimeoutError as error:
            raise StartError(f"{error}\n{self.log_tail()}") from error
        self.started_in_s = time.monotonic() - began
        self.record()
        return self

    def healthy(self) -> bool:
        """The front door answers 200 and every expected process is there and not stopped."""
        if self.topology.offline_tp is not None:
            answered = (self.work / "ready").exists()
        elif self.topology.uds:
            answered = self.uds.exists() and get_uds(self.uds, "/health") == 200
        else:
            answered = self.get_status("/health") == 200
        return answered and not self.broken()

    def spoil(self, why: str) -> None:
        """Say that a fault cannot be healed: the next test gets a fresh one."""
        self.record()
        self.spoiled = why

    def broken(self) -> str:
        """What is not as the topology says, in words; empty where all is well."""
        by_role = {
            "engines": (len(self.engines), self.topology.engines),
            "workers": (len(self.workers), self.topology.workers),
            "API servers": (len(self.apis), self.topology.apis),
        }
        wrong = [f"{found} of {wanted} {role}" for role, (found, wanted) in by_role.items() if found != wanted]
        wrong += [f"pid {p.pid} is {p.state}" for p in self.processes().values() if p.state in "TtZX"]
        return ", ".join(wrong)

    def warm_up(self) -> Server:
        """Complete one request where the shape can: the very first one takes seconds longer."""
        if self.topology.answers and self.topology.apis and not self.topology.uds:
            self.request(2).result(START_DEADLINE_S)
        return self

    # --- what is there: the ground truth

    def processes(self) -> dict[int, Proc]:
        """Every process of it that exists now, orphans and zombies included."""
        return procs.family(self.roots, self.marker, procs.scan())

    @property
    def roots(self) -> list[int]:
        """The process that was launched for each node."""
        return [root.pid for root in self._roots]

    def _of(self, kind: str) -> list[Proc]:
        return [p for p in self.processes().values() if p.kind == kind]

    @property
    def apis(self) -> list[int]:
        """API servers by index. One alone is the launched process itself."""
        if self.topology.apis == 1:
            return [pid for pid in self.roots[:1] if procs.state(pid) not in ("", "Z")]
        return [p.pid for p in sorted(self._of("APIServer"), key=lambda p: p.rank)]

    @property
    def api(self) -> int:
        """The first API server."""
        return self.apis[0]

    @property
    def engines(self) -> list[int]:
        """EngineCores by DP rank. Offline without multiprocessing it is the user's script."""
        if self.topology.env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            return self.roots
        return [p.pid for p in sorted(self._of("EngineCore"), key=lambda p: p.rank)]

    @property
    def engine(self) -> int:
        """The first EngineCore."""
        return self.engines[0]

    @property
    def workers(self) -> list[int]:
        """Workers: by engine, then by the rank in the title (dense DP workers carry no DP rank)."""
        engines = self.engines
        order = {pid: i for i, pid in enumerate(engines)}
        found = sorted(self._of("Worker"), key=lambda p: (order.get(p.ppid, len(order)), p.rank))
        return [p.pid for p in found]

    @property
    def coordinators(self) -> list[int]:
        """DP coordinators."""
        return [p.pid for p in self._of("DPCoordinator")]

    def pids(self) -> dict[str, list[int]]:
        """Everything by role; ``other`` holds launchers, trackers and children without a title."""
        roles = {
            "APIServer": self.apis,
            "EngineCore": self.engines,
            "Worker": self.workers,
            "DPCoordinator": self.coordinators,
        }
        named = {pid for pids in roles.values() for pid in pids}
        return roles | {"other": [pid for pid in self.processes() if pid not in named]}

    def segments(self) -> dict[str, int]:
        """path -> inode of the /dev/shm files that it maps now."""
        return procs.shm_files(self.processes())

    def log(self, node: int = 0) -> Path:
        """Output of one node."""
        return self.work / f"node{node}.log"

    def log_text(self) -> str:
        """Output of all nodes."""
        return "".join(self.log(node).read_text(errors="replace") for node in self.nodes if self.log(node).exists())

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the output, without the list of routes."""
        return "\n".join([line for line in self.log_text().splitlines() if "] Route: /" not in line][-lines:])

    # --- work for it

    def get_status(self, path: str, timeout_s: float = 5.0) -> int | None:
        """Status of a GET, None where no answer came."""
        try:
            return get(self.port, path, timeout_s)[0]
        except (OSError, http.client.HTTPException):
            return None

    def metric(self, name: str) -> float:
        """One sample of /metrics, summed over engines. Raises OSError or http.client.HTTPException."""
        lines = get(self.port, "/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def request(self, max_tokens: int = 16, **more: Any) -> Call:
        """A completion in the background; ``stream=True`` and other fields of the API go in `more`."""
        return Call(self.port, "/v1/completions", completion(self.model, max_tokens, **more))

    @contextmanager
    def load(self, clients: int = 4, max_tokens: int = 64) -> Iterator[Load]:
        """Steady work; the block begins when the first answer is complete."""
        load = Load(self.port, completion(self.model, max_tokens), clients)
        try:
            wait_until("the load gets an answer", lambda: load.completed)
            yield load
        finally:
            load.end()

    @contextmanager
    def slow_client(self, clients: int = 4, max_tokens: int = 2000) -> Iterator[list[socket.socket]]:
        """Streaming clients that never read."""
        with deaf(self.port, completion(self.model, max_tokens), clients) as sockets:
            yield sockets

    def rpc(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Call:
        """POST /collective_rpc in the background: every worker calls `method` (see inside/labext.py)."""
        return Call(
            self.port,
            "/collective_rpc",
            {"method": method, "args": list(args), "kwargs": kwargs, "timeout": timeout_s},
        )

    # --- the end

    def record(self) -> None:
        """Remember what must be removed at the end, while somebody still holds it."""
        pids = list(self.processes())
        self._segments.update(procs.shm_files(pids))
        self._sockets.update(procs.unix_paths(pids))

    def stop(self) -> None:
        """Kill every process of it, then remove its segments, sockets and directory. May be called twice."""
        self.record()

        def all_gone() -> bool:
            left = self.processes()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
            for root in self._roots:
                root.poll()
            return not left

        wait_until(f"{self.topology.name} is gone", all_gone, 60)
        procs.unlink_shm(self._segments)
        for path in self._sockets:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def terminate(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ask each launched process to end, as a supervisor does; does not wait."""
        self.record()
        for root in self._roots:
            root.send_signal(sig)


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def get_uds(path: Path, target: str) -> int | None:
    """Status of a GET over a unix socket, None where no answer came."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        try:
            sock.connect(str(path))
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            words = sock.recv(64).split()
        except OSError:
            return None
    return int(words[1]) if len(words) > 1 else None


def _wrapper(shm_size: str | None, nofile: int | None) -> list[str]:
    """A command prefix that prepares and then execs, so that the launched pid stays vLLM's own."""
    lines = []
    if nofile is not None:
        lines.append(f"ulimit -n {nofile}")
    if shm_size is not None:
        lines.append(f"mount -t tmpfs -o size={shm_size} tmpfs /dev/shm")
    if not lines:
        return []
    shell = ["sh", "-c", " && ".join([*lines, 'exec "$@"']), "sh"]
    return ["unshare", "--mount", *shell] if shm_size is not None else shell

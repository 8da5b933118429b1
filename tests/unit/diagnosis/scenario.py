"""Snapshots made by hand: a healthy server of a given shape, on which a test changes what its fault would change.

Stacks are those of vLLM 0.32 on CPU, shortened to the frames that carry meaning. Nothing here runs; the values are what
the sources would have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.http import HttpProbe, MetricsScrape
from vllmdiag.model.process import Frame, Process, ProcessSample, ShmFd, StackDump, Thread, ThreadSample, ThreadStack
from vllmdiag.model.shm import Holder, Segment, ShmMount, TailState
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket, SocketOwner, SocketSample, ZmtpProbe

WINDOW = 3.0
TIMES = (0.0, 1.5, 3.0)
API, ENGINE, WORKER0 = 100, 200, 300
PORT = 8000
MIB = 1 << 20
SHM = "vllm/distributed/device_communicators/shm_broadcast.py"
EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
CORE = "vllm/v1/engine/core.py"

Stack = tuple[tuple[str, str], ...]
_BOOT: Stack = (
    ("BaseProcess.run", "multiprocessing/process.py"),
    ("BaseProcess._bootstrap", "multiprocessing/process.py"),
)
_LOOP: Stack = (
    ("EngineCoreProc.run_busy_loop", CORE),
    ("EngineCoreProc.run_engine_core", CORE),
    *_BOOT,
)
_ACQUIRE_READ: Stack = (
    ("Poller.poll", "zmq/sugar/poll.py"),
    ("SpinCondition.wait", SHM),
    ("MessageQueue.acquire_read", SHM),
    ("MessageQueue.dequeue", SHM),
)
_WORKER_LOOP: Stack = (("WorkerProc.worker_busy_loop", EXECUTOR), ("WorkerProc.worker_main", EXECUTOR), *_BOOT)

API_IDLE: Stack = (
    ("Runner.run", "asyncio/runners.py"),
    ("run", "uvloop/__init__.py"),
    ("main", "vllm/entrypoints/cli/main.py"),
)
API_WAITS_START: Stack = (
    ("Socket.poll", "zmq/sugar/socket.py"),
    ("wait_for_engine_startup", "vllm/v1/engine/utils.py"),
    ("launch_core_engines", "vllm/v1/engine/utils.py"),
    ("main", "vllm/entrypoints/cli/main.py"),
)
ENGINE_IDLE: Stack = (
    ("Condition.wait", "threading.py"),
    ("Queue.get", "queue.py"),
    ("EngineCoreProc._process_input_queue", CORE),
    *_LOOP,
)
ENGINE_WAITS: Stack = (
    *_ACQUIRE_READ,
    ("MultiprocExecutor.collective_rpc.<locals>.get_response", EXECUTOR),
    ("FutureWrapper.result", EXECUTOR),
    ("EngineCore.step", CORE),
    ("EngineCoreProc._process_engine_step", CORE),
    *_LOOP,
)
ENGINE_BLOCKED: Stack = (
    ("sched_yield", "vllm/distributed/utils.py"),
    ("MessageQueue.acquire_write", SHM),
    ("MessageQueue.enqueue", SHM),
    ("MultiprocExecutor.collective_rpc", EXECUTOR),
    ("EngineCoreProc._process_input_queue", CORE),
    *_LOOP,
)
ENGINE_WAITS_START: Stack = (
    ("_PollLikeSelector.select", "selectors.py"),
    ("wait", "multiprocessing/connection.py"),
    ("WorkerProc.wait_for_ready", EXECUTOR),
    ("MultiprocExecutor._init_executor", EXECUTOR),
    ("EngineCoreProc.__init__", CORE),
    ("EngineCoreProc.run_engine_core", CORE),
    *_BOOT,
)
WORKER_IDLE: Stack = (*_ACQUIRE_READ, *_WORKER_LOOP)
WORKER_ALL_REDUCE: Stack = (
    ("OpOverloadPacket.__call__", "torch/_ops.py"),
    ("_CPUSHMDistributed.all_reduce", "vllm/distributed/device_communicators/cpu_communicator.py"),
    ("CpuCommunicator.all_reduce", "vllm/distributed/device_communicators/cpu_communicator.py"),
    ("GroupCoordinator._all_reduce_out_place", "vllm/distributed/parallel_state.py"),
    ("Worker.execute_model", "vllm/v1/worker/gpu_worker.py"),
    *_WORKER_LOOP,
)
WORKER_ALL_GATHER: Stack = (
    ("_CPUSHMDistributed.all_gather_into_tensor", "vllm/distributed/device_communicators/cpu_communicator.py"),
    ("GroupCoordinator.all_gather", "vllm/distributed/parallel_state.py"),
    ("Worker.execute_model", "vllm/v1/worker/gpu_worker.py"),
    *_WORKER_LOOP,
)
ENGINE_RUNS_MODEL: Stack = (
    ("Event.synchronize", "torch/cuda/streams.py"),
    ("GPUModelRunner._to_list", "vllm/v1/worker/gpu_model_runner.py"),
    ("Worker.execute_model", "vllm/v1/worker/gpu_worker.py"),
    ("run_method", "vllm/v1/serial_utils.py"),
    ("UniProcExecutor.collective_rpc", "vllm/v1/executor/uniproc_executor.py"),
    ("EngineCore.step", CORE),
    ("EngineCoreProc._process_engine_step", CORE),
    *_LOOP,
)
WORKER_METHOD: Stack = (("LabExt.lab_busy", "labext.py"), ("run_method", "vllm/v1/serial_utils.py"), *_WORKER_LOOP)
WORKER_IN_STORE: Stack = (
    ("_create_c10d_store", "torch/distributed/rendezvous.py"),
    ("init_process_group", "torch/distributed/distributed_c10d.py"),
    ("init_distributed_environment", "vllm/distributed/parallel_state.py"),
    ("Worker.init_device", "vllm/v1/worker/gpu_worker.py"),
    ("WorkerProc.__init__", EXECUTOR),
    ("WorkerProc.worker_main", EXECUTOR),
    *_BOOT,
)
INPUT_POLLS: Stack = (
    ("Poller.poll", "zmq/sugar/poll.py"),
    ("EngineCoreProc.process_input_sockets", CORE),
    ("Thread.run", "threading.py"),
)
OUTPUT_WAITS: Stack = (
    ("Condition.wait", "threading.py"),
    ("Queue.get", "queue.py"),
    ("EngineCoreProc.process_output_sockets", CORE),
    ("Thread.run", "threading.py"),
)
OUTPUT_SENDS: Stack = (
    ("Socket.send", "zmq/sugar/socket.py"),
    ("Socket.send_multipart", "zmq/sugar/socket.py"),
    ("EngineCoreProc.process_output_sockets", CORE),
    ("Thread.run", "threading.py"),
)
INPUT_STUCK: Stack = (
    ("LRUCache.popitem", "vllm/utils/cache.py"),
    ("EngineCoreProc.process_input_sockets", CORE),
    ("Thread.run", "threading.py"),
)


def frames(stack: Stack) -> tuple[Frame, ...]:
    """A stack as py-spy gives it, innermost first."""
    return tuple(Frame(name=name, file=file, line=10 + i) for i, (name, file) in enumerate(stack))


def segment(ino: int, size: int, holders: Sequence[int], tails: Sequence[bytes], polls: int = 2000) -> Segment:
    """A ring of 10 slots whose flags went through these states."""
    return Segment(
        path=f"/dev/shm/psm_{ino:08x}",
        dev=1,
        ino=ino,
        size=size,
        resident=40960,
        holders=tuple(Holder(pid=p, fds=(10,)) for p in holders),
        tail_bytes=len(tails[0]),
        polls=polls,
        polled_s=WINDOW,
        states=tuple(TailState(t=i * WINDOW / len(tails), tail=tail) for i, tail in enumerate(tails)),
    )


def _each(stack: Stack | Sequence[Stack]) -> Sequence[Stack]:
    """One stack for each dump."""
    several = bool(stack) and bool(stack[0]) and isinstance(stack[0][0], tuple)
    return stack if several else [stack] * len(TIMES)  # type: ignore[list-item,return-value]


@dataclass
class Server:
    """A server of one engine with `tp` workers, idle until a test says otherwise: set fields, then take `snapshot`."""

    tp: int = 2
    run_delay: dict[int, float] = field(default_factory=dict)
    """Share of the window that the main thread of a process stood in the run queue."""
    uniproc: bool = False
    """The engine runs the model itself, as it does with TP=1 on GPUs: no worker, no ring."""
    version: str | None = "0.32.0"
    titles: bool = True
    stacks: dict[int, Stack | Sequence[Stack] | Missing] = field(default_factory=dict)
    states: dict[int, str | Sequence[str]] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Processes that are not there at all."""
    threads: dict[str, Stack | Sequence[Stack] | None] = field(
        default_factory=lambda: {
            "Thread-1 (process_input_sockets)": INPUT_POLLS,
            "Thread-2 (process_output_sockets)": OUTPUT_WAITS,
        }
    )
    """Threads of the engine, one stack or one for each dump; None takes one away."""
    polled: bool = True
    """Whether the rings could be read."""
    resident: int = 40960
    """Bytes of each ring that are backed by memory."""
    unlinked: bool = False
    """The files of the rings are gone."""
    broadcast: Sequence[bytes] | None = None
    """Flags of the broadcast ring over the window; None: everything read."""
    replies: dict[int, Sequence[bytes]] = field(default_factory=dict)
    """Flags of the response ring by worker number."""
    metrics: tuple[dict[str, float], dict[str, float]] | None = None
    health: int | None = 200
    listening: bool = True
    input_backlog: int = 0
    """Bytes that the engine has not read from its request socket."""
    output_backlog: Sequence[int] = (0, 0, 0)
    """Bytes that the server has not read of what the engine has sent."""
    rss: Sequence[int] = (1 << 30,) * 3
    """Of the server."""
    send_q: Sequence[int] = ()
    """Send queue of one HTTP connection over the window; empty: no connection."""
    http_states: Sequence[str] = ("ESTAB",) * 3
    """Its states."""
    connected: bool = True
    ppid_engine: int = API
    no_api: bool = False
    shm_size: int = 24 << 30
    shm_free: int = 24 << 30
    extra_segments: tuple[Segment, ...] = ()
    processes: dict[int, dict[str, object]] = field(default_factory=dict)
    """Fields of single processes to replace at the end."""
    args: tuple[str, ...] = ()
    age: float = 600.0
    ipc_paths_missing: tuple[str, ...] = ()
    zmtp: tuple[ZmtpProbe, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)
    """Fields of the snapshot to replace at the end."""

    @property
    def workers(self) -> list[int]:
        return [] if self.uniproc else [WORKER0 + k for k in range(self.tp)]

    def row(self, *flags: int) -> bytes:
        """One metadata row: written, then one flag per reader."""
        return bytes(flags)

    def ring(self, unread: dict[int, Sequence[int]]) -> bytes:
        """Flags of the broadcast ring with these slots unread: slot -> readers that have not taken it."""
        return b"".join(
            bytes([1, *(0 if k in unread.get(slot, ()) else 1 for k in range(self.tp))]) for slot in range(10)
        )

    def snapshot(self) -> Snapshot:
        """The value that the sources would have recorded."""
        pids = [*([] if self.no_api else [API]), ENGINE, *self.workers]
        processes = [self._process(pid) for pid in pids if pid not in self.gone]
        made = Snapshot(
            tool="test",
            observed_at="2026-01-01T00:00:00.000Z",
            window_s=WINDOW,
            target_pids=tuple(p.pid for p in processes),
            processes=tuple(processes),
            segments=(*self._segments(), *self.extra_segments),
            shm_mounts=(
                ShmMount(
                    mnt_ns=1,
                    path="/dev/shm",
                    size=self.shm_size,
                    free=self.shm_free,
                    pids=tuple(p.pid for p in processes),
                ),
            ),
            sockets=tuple(self._sockets()),
            http=tuple(self._http()),
            metrics=tuple(self._metrics()),
            ipc_paths_missing=self.ipc_paths_missing,
            zmtp=self.zmtp,
        )
        return msgspec.structs.replace(made, **self.fields)

    def _cmdline(self, pid: int) -> tuple[str, ...]:
        spawned = (
            "/v/bin/python",
            "-c",
            "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=9)",
            "--multiprocessing-fork",
        )
        if pid == API:
            return (
                "/v/bin/python",
                "/v/bin/vllm",
                "serve",
                "m",
                "--tensor-parallel-size",
                str(self.tp),
                "--port",
                str(PORT),
                *self.args,
            )
        if not self.titles:
            return spawned
        if pid == ENGINE:
            return ("VLLM::EngineCore",)
        return (f"VLLM::Worker_TP{pid - WORKER0}" if self.tp > 1 else "VLLM::Worker",)

    def _samples(self, pid: int) -> tuple[ProcessSample, ...]:
        states = self.states.get(pid, "S")
        if isinstance(states, str):
            states = [states] * len(TIMES)
        used = self.cpu.get(pid, 0.0)
        waited = self.run_delay.get(pid, 0.0)
        return tuple(
            ProcessSample(
                t=t,
                state=state,
                utime=5.0 + used * t,
                stime=1.0,
                rss=rss if pid == API else 1 << 30,
                run_delay=waited * t,
            )
            for t, state, rss in zip(TIMES, states, self.rss, strict=True)
        )

    def _process(self, pid: int) -> Process:
        ppid = {API: 1, ENGINE: self.ppid_engine}.get(pid, ENGINE)
        process = Process(
            pid=pid,
            starttime=pid,
            age_s=self.age,
            ppid=ppid,
            pgid=API,
            uid=1000,
            comm="python",
            cmdline=self._cmdline(pid),
            exe="/v/bin/python3.11",
            samples=self._samples(pid),
            threads=(self._thread(pid),),
            stacks=self._dumps(pid),
            n_fds=60,
            shm_fds=(ShmFd(fd=10, path="/dev/shm/psm_1", deleted=False, dev=1, ino=1, size=1),),
            socket_inodes=(pid * 10,),
            vllm_version=self.version,
        )
        return msgspec.structs.replace(process, **self.processes.get(pid, {}))

    def _thread(self, pid: int) -> Thread:
        used = self.cpu.get(pid, 0.0)
        return Thread(
            tid=pid,
            name="python",
            samples=tuple(ThreadSample(t=t, state="S", utime=5.0 + used * t, stime=1.0) for t in TIMES),
        )

    def _dumps(self, pid: int) -> tuple[StackDump, ...]:
        default = {API: API_IDLE, ENGINE: ENGINE_IDLE}.get(pid, WORKER_IDLE)
        given = self.stacks.get(pid, default)
        if isinstance(given, Missing):
            return tuple(StackDump(t=t, threads=given) for t in TIMES)
        dumps = []
        for n, t in enumerate(TIMES):
            threads = [ThreadStack(name="MainThread", tid=pid, frames=frames(_each(given)[n]))]
            if pid == ENGINE:
                threads += [
                    ThreadStack(name=name, tid=pid + 1 + i, frames=frames(_each(stack)[n]))
                    for i, (name, stack) in enumerate(self.threads.items())
                    if stack is not None
                ]
            dumps.append(StackDump(t=t, threads=tuple(threads)))
        return tuple(dumps)

    def _segments(self) -> list[Segment]:
        if self.uniproc or not self.polled:
            return []
        everything_read = b"\x01" * (10 * (1 + self.tp))
        here = [w for w in self.workers if w not in self.gone]
        engine = [] if ENGINE in self.gone else [ENGINE]
        made = [segment(1, 10 * (16 * MIB + 1 + self.tp), [*engine, *here], self.broadcast or [everything_read])]
        for k, pid in enumerate(self.workers):
            holders = [*engine, *([pid] if pid in here else [])]
            if holders:
                made.append(segment(2 + k, 10 * (24 * MIB + 2), holders, self.replies.get(k, [b"\x01" * 20])))
        return [msgspec.structs.replace(s, resident=self.resident, deleted=self.unlinked) for s in made]

    def _sockets(self) -> list[Socket]:
        def sock(inode: int, owner: int | None, **more: object) -> Socket:
            owners = () if owner is None else (SocketOwner(pid=owner, fds=(5,)),)
            return msgspec.structs.replace(Socket(family="unix", inode=inode, state="ESTAB", owners=owners), **more)

        made = []
        if not self.no_api and API not in self.gone:
            made.append(sock(1000, API, state="LISTEN", local="/tmp/in", send_q=100, recv_q=0))
            if self.listening:
                made.append(
                    sock(1001, API, family="tcp", state="LISTEN", local=f"127.0.0.1:{PORT}", recv_q=0, send_q=2048)
                )
            if self.connected and ENGINE not in self.gone:
                queue = tuple(SocketSample(t=t, recv_q=self.input_backlog, send_q=0, state="ESTAB") for t in TIMES)
                back = tuple(
                    SocketSample(t=t, recv_q=n, send_q=0, state="ESTAB")
                    for t, n in zip(TIMES, self.output_backlog, strict=True)
                )
                made.append(sock(1002, API, local="/tmp/in", peer_inode=1003, samples=back))
                made.append(sock(1003, ENGINE, peer_inode=1002, recv_q=self.input_backlog, samples=queue))
            if self.send_q:
                samples = tuple(
                    SocketSample(t=t, recv_q=0, send_q=q, state=state)
                    for t, q, state in zip(TIMES, self.send_q, self.http_states, strict=True)
                )
                made.append(
                    sock(
                        1004,
                        API,
                        family="tcp",
                        local=f"127.0.0.1:{PORT}",
                        remote="10.0.0.9:41000",
                        send_q=self.send_q[-1],
                        samples=samples,
                    )
                )
        return made

    def _http(self) -> list[HttpProbe]:
        if self.no_api or API in self.gone or not self.listening:
            return []
        if self.health is None:
            return [HttpProbe(t=0.1, port=PORT, path="/health", status=None, error="timeout", total_s=2.4)]
        return [
            HttpProbe(t=0.1, port=PORT, path="/health", status=self.health, total_s=0.01),
            HttpProbe(t=0.2, port=PORT, path="/version", status=200, version=self.version),
        ]

    def _metrics(self) -> list[MetricsScrape]:
        if self.health is None or self.no_api or not self.listening:
            return []
        first, last = self.metrics or ({"num_requests_running": 0.0}, {"num_requests_running": 0.0})
        return [
            MetricsScrape(t=t, port=PORT, values={name: {"0": value} for name, value in values.items()})
            for t, values in ((0.2, first), (2.9, last))
        ]

"""Causes that logs, the kernel, the host, the scheduler and the way of the client tell of, and what looks like them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllmdiag.model.http import ClientView, HttpProbe
from vllmdiag.model.process import Cgroup, Process, Thread, ThreadSample
from vllmdiag.model.snapshot import KernelLine, Node
from vllmdiag.vllm.logscan import Scanner

from .scenario import (
    API,
    CORE,
    ENGINE,
    ENGINE_IDLE,
    ENGINE_WAITS,
    PORT,
    TIMES,
    WORKER0,
    WORKER_ALL_REDUCE,
    WORKER_IDLE,
    Server,
    Stack,
)

Scenario = Callable[[Server], None]
W0, W1 = WORKER0, WORKER0 + 1
_EVERYBODY = {API, ENGINE, W0, W1}
_LOOP = ENGINE_IDLE[-4:]
SCHEDULES: Stack = (
    ("KVCacheManager.allocate_slots", "vllm/v1/core/kv_cache_manager.py"),
    ("Scheduler.schedule", "vllm/v1/core/sched/scheduler.py"),
    ("EngineCore.step_with_batch_queue", CORE),
    ("EngineCoreProc._process_engine_step", CORE),
    *_LOOP,
)
COMPILES_GRAMMAR: Stack = (
    ("GrammarCompiler.compile_json_schema", "xgrammar/compiler.py"),
    ("XgrammarBackend.compile_grammar", "vllm/v1/structured_output/backend_xgrammar.py"),
    ("StructuredOutputManager._create_grammar", "vllm/v1/structured_output/__init__.py"),
    ("_WorkItem.run", "concurrent/futures/thread.py"),
    ("_worker", "concurrent/futures/thread.py"),
)
POOL_WAITS: Stack = (("_worker", "concurrent/futures/thread.py"), ("Thread.run", "threading.py"))
WAITS_FOR_ENGINES: Stack = (
    ("all_reduce", "torch/distributed/distributed_c10d.py"),
    ("ParallelConfig.has_unfinished_dp", "vllm/config/parallel.py"),
    ("DPEngineCoreProc._has_global_unfinished_reqs", CORE),
    *_LOOP,
)
FATAL = """\
(EngineCore pid=200) ERROR 07-02 03:11:20 [core.py:1201] EngineCore encountered a fatal error.
(EngineCore pid=200) ERROR 07-02 03:11:20 [core.py:1201] Traceback (most recent call last):
(EngineCore pid=200) ERROR 07-02 03:11:20 [core.py:1201]   File "/v/vllm/v1/engine/core.py", line 133, in step
(EngineCore pid=200) ERROR 07-02 03:11:20 [core.py:1201] {error}
(APIServer pid=100) ERROR 07-02 03:11:20 [async_llm.py:906] AsyncLLM output_handler failed.
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).
"""
CHANNEL = "ray.exceptions.RayChannelTimeoutError: System error: Timed out waiting for object available to read."
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
WOKEN = (
    "(EngineCore pid=200) INFO 07-02 03:10:58 [abstract.py:353] It took 2.071212 seconds to wake up tags ['weights'].\n"
)
KILLED = "Memory cgroup out of memory: Killed process 301 (VLLM::Worker_TP) total-vm:9000kB, anon-rss:8000kB"


def log(server: Server, text: str) -> None:
    """Give it a log."""
    scanner = Scanner("vllm.log")
    scanner.feed(text.encode())
    found = scanner.result()
    server.fields |= {"logs": (found.digest,), "log_lines": found.lines}


def only_log(server: Server, text: str) -> None:
    """Nothing but a log is there."""
    server.gone, server.no_api, server.listening, server.polled = set(_EVERYBODY), True, False, False
    log(server, text)


def requests(*ages: int, again: bool = False) -> str:
    """Requests of 90 characters, a minute apart, aborted at these ages."""
    lines, at = [], 0
    for n, age in enumerate(ages):
        lines.append((at, f"[logger.py:43] Received request cmpl-{n:04d}: prompt: 'x', params: SamplingParams(n=1)"))
        lines.append((at + age, f"[async_llm.py:420] Aborted request(s) cmpl-{n:04d}."))
        at += age + 2 if again else age + 400
    if again:
        lines.append((at, "[logger.py:43] Received request cmpl-9999: prompt: 'x', params: SamplingParams(n=1)"))
    return "".join(
        f"(APIServer pid=100) INFO 07-0{1 + t // 86400} {t // 3600 % 24:02d}:{t // 60 % 60:02d}:{t % 60:02d} {words}\n"
        for t, words in sorted(lines)
    )


def stalled(server: Server) -> None:
    """A request runs and nothing moves."""
    server.stacks = {ENGINE: ENGINE_WAITS, W0: WORKER_ALL_REDUCE, W1: WORKER_IDLE}
    server.cpu = {W0: 1.0}
    same = {"num_requests_running": 1.0, "generation_tokens_total": 5.0}
    server.metrics = (same, same)


def killed_by_the_kernel(server: Server) -> None:
    stalled(server)
    server.states[W1] = ["S", "Z", "Z"]
    server.fields = {"kernel_lines": (KernelLine(t=1.0, text=KILLED),)}


def killed_in_a_small_group(server: Server) -> None:
    stalled(server)
    server.gone = {W1}
    group = Cgroup(path="/vllm", version=2, oom_kill=1, memory_max=8 << 30)
    server.processes[ENGINE] = {"cgroup": group}


def killed_by_somebody(server: Server) -> None:
    """A SIGKILL from outside: the counter of the group stays at zero."""
    killed_in_a_small_group(server)
    server.processes[ENGINE] = {"cgroup": Cgroup(path="/vllm", version=2, oom_kill=0)}


def a_kill_long_ago(server: Server) -> None:
    """The group has lost somebody once; everybody of this server is there."""
    server.processes[ENGINE] = {"cgroup": Cgroup(path="/vllm", version=2, oom_kill=3)}


def host_in_the_kernel(server: Server) -> None:
    stalled(server)
    server.fields = {"node": Node(n_cpus=64, load1=2056.0, kernel_share=0.985)}


def busy_small_host(server: Server) -> None:
    """Ten tasks on two processors: slow, and no fault of the host."""
    server.fields = {"node": Node(n_cpus=2, load1=10.0, kernel_share=0.3, pressure_cpu=0.95)}


def channel_timed_out(server: Server) -> None:
    only_log(server, FATAL.format(error=CHANNEL))


def channel_timed_out_long_ago(server: Server) -> None:
    """The server has been started anew, and serves."""
    log(server, FATAL.format(error=CHANNEL) + "INFO 07-02 03:20:00 [api_server.py:9] vLLM API server version 0.11.0\n")


def nothing_fits(server: Server) -> None:
    server.stacks = {ENGINE: SCHEDULES}
    server.cpu = {ENGINE: 1.0}
    same = {
        "num_requests_running": 0.0,
        "num_requests_waiting": 3.0,
        "num_requests_waiting_by_reason:capacity": 3.0,
        "kv_cache_usage_perc": 0.98,
        "generation_tokens_total": 5551000.0,
    }
    server.metrics = (same, same)


def full_and_working(server: Server) -> None:
    """The cache is as full, and requests run."""
    nothing_fits(server)
    first = server.metrics[0] if server.metrics else {}
    server.metrics = (
        {**first, "num_requests_running": 40.0},
        {**first, "num_requests_running": 40.0, "generation_tokens_total": 5551900.0},
    )


def _pool(server: Server, stack: Stack | list[Stack], cores: float) -> None:
    server.threads["ThreadPoolExecutor-1_0"] = stack
    tid = ENGINE + len(server.threads)
    samples = tuple(ThreadSample(t=t, state="R", utime=cores * t, stime=0.0) for t in TIMES)
    server.processes[ENGINE] = {"threads": (Thread(tid=tid, name="python", samples=samples),)}
    same = {"num_requests_running": 0.0, "num_requests_waiting": 1.0, "generation_tokens_total": 7.0}
    server.metrics = (same, same)


def grammar_without_an_end(server: Server) -> None:
    _pool(server, COMPILES_GRAMMAR, 1.0)


def grammar_for_a_moment(server: Server) -> None:
    _pool(server, [COMPILES_GRAMMAR, POOL_WAITS, POOL_WAITS], 0.1)
    server.metrics = None


def _second_engine(server: Server) -> None:
    """EngineCore_DP1, idle, beside the one of the scenario."""
    first = server.snapshot().process(ENGINE)
    assert first is not None
    idle: Process | None = Server().snapshot().process(ENGINE)
    assert idle is not None
    threads = tuple(
        msgspec.structs.replace(
            dump, threads=tuple(msgspec.structs.replace(t, tid=(t.tid or 0) + 200) for t in dump.threads)
        )
        for dump in idle.stacks
        if not hasattr(dump.threads, "why")
    )
    second = msgspec.structs.replace(
        idle, pid=400, starttime=400, cmdline=("VLLM::EngineCore_DP1",), stacks=threads, threads=(), socket_inodes=()
    )
    server.processes[ENGINE] = {**server.processes.get(ENGINE, {}), "cmdline": ("VLLM::EngineCore_DP0",)}
    made = server.snapshot()
    server.fields |= {"processes": (*made.processes, second), "target_pids": (*made.target_pids, 400)}


def engine_alone_in_a_wave(server: Server) -> None:
    server.uniproc, server.tp = True, 1
    server.stacks = {ENGINE: WAITS_FOR_ENGINES}
    same = {"num_requests_running": 1.0, "generation_tokens_total": 5.0}
    server.metrics = (same, same)
    _second_engine(server)


def engines_that_both_idle(server: Server) -> None:
    server.uniproc, server.tp = True, 1
    _second_engine(server)


def woken_too_fast(server: Server) -> None:
    only_log(server, WOKEN + FATAL.format(error=ILLEGAL))


def woken_under_a_stall(server: Server) -> None:
    """The server lives, and hangs after the wake-up; the driver has reported the address."""
    stalled(server)
    server.stacks[W1] = WORKER_ALL_REDUCE
    log(server, WOKEN)
    xid = "NVRM: Xid (PCI:0000:3d:00): 31, pid=301, name=VLLM::Worker_TP, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
    server.fields["kernel_lines"] = (KernelLine(t=9.0, text=xid),)


def woken_and_well(server: Server) -> None:
    log(server, WOKEN)


def given_up_after_ten_minutes(server: Server) -> None:
    only_log(server, requests(600, 601, 600, 599))


def given_up_at_any_age(server: Server) -> None:
    log(server, requests(16, 44, 190, 71, 480, 300))


def retried_after_a_quarter(server: Server) -> None:
    only_log(server, requests(900, 901, 900, 900, again=True))


def retried_once(server: Server) -> None:
    log(server, requests(900, again=True))


def late_behind_a_proxy(server: Server) -> None:
    server.stacks = {}
    server.send_q = (0, 0, 0)
    server.metrics = ({"generation_tokens_total": 5000.0}, {"generation_tokens_total": 5040.0})
    server.fields = {"client_views": (ClientView(first_byte_s=16.5, burst_chunks=65.0, burst_gap_s=16.5),)}


def in_time_behind_a_proxy(server: Server) -> None:
    late_behind_a_proxy(server)
    server.fields = {"client_views": (ClientView(first_byte_s=0.3, burst_chunks=1.0, burst_gap_s=0.02),)}


def probe_caught_by_a_proxy(server: Server) -> None:
    straight = HttpProbe(t=0.1, port=PORT, path="/health", status=200, total_s=0.01)
    caught = HttpProbe(t=0.2, port=PORT, path="/health", status=503, total_s=0.01, proxy="http://proxy:3128")
    server.fields = {"http": (straight, caught)}


def probe_passed_on_by_a_proxy(server: Server) -> None:
    probe_caught_by_a_proxy(server)
    found = HttpProbe(t=0.2, port=PORT, path="/health", status=200, total_s=0.02, proxy="http://proxy:3128")
    server.fields = {"http": (found,)}


def only_echoes(server: Server) -> None:
    only_log(server, FATAL.format(error="TimeoutError: RPC call to execute_model timed out."))


def a_long_wait_of_an_idle_engine(server: Server) -> None:
    words = "No available shared memory broadcast block found in 600 seconds. This typically happens when ..."
    log(server, f"(EngineCore pid=200) INFO 05-23 11:00:00 [shm_broadcast.py:871] {words}\n")


FAULTS: list[tuple[str, Scenario, str, str | None]] = [
    ("oom-killed", killed_by_the_kernel, "Worker_TP1", "critical"),
    ("oom-killed", killed_in_a_small_group, "Worker_TP1", "critical"),
    ("host-overloaded", host_in_the_kernel, "EngineCore", "critical"),
    ("ray-channel-timeout", channel_timed_out, "EngineCore", "critical"),
    ("scheduler-livelock", nothing_fits, "EngineCore", "critical"),
    ("grammar-busy", grammar_without_an_end, "EngineCore", "critical"),
    ("dp-wave-split", engine_alone_in_a_wave, "EngineCore_DP1", "critical"),
    ("sleep-wake-race", woken_too_fast, "EngineCore", "critical"),
    ("sleep-wake-race", woken_under_a_stall, "EngineCore", "critical"),
    ("client-abort-silent", given_up_after_ten_minutes, "the client, or a proxy before it", "warning"),
    ("client-retry-loop", retried_after_a_quarter, "the client, or a proxy before it", "warning"),
    ("proxy-buffering", late_behind_a_proxy, "proxy 10.0.0.9", "warning"),
    ("proxy-env", probe_caught_by_a_proxy, "the prober", "warning"),
    ("echo-only", only_echoes, "EngineCore", "unknown"),
]
LOOK_ALIKES: list[tuple[str, Scenario, str]] = [
    ("oom-killed", a_kill_long_ago, "idle"),
    ("host-overloaded", busy_small_host, "idle"),
    ("ray-channel-timeout", channel_timed_out_long_ago, "idle"),
    ("scheduler-livelock", full_and_working, "serving"),
    ("grammar-busy", grammar_for_a_moment, "idle"),
    ("dp-wave-split", engines_that_both_idle, "idle"),
    ("sleep-wake-race", woken_and_well, "idle"),
    ("client-abort-silent", given_up_at_any_age, "idle"),
    ("client-retry-loop", retried_once, "idle"),
    ("proxy-buffering", in_time_behind_a_proxy, "serving"),
    ("proxy-env", probe_passed_on_by_a_proxy, "idle"),
    ("echo-only", a_long_wait_of_an_idle_engine, "idle"),
]

"""Stacks of real servers (vLLM 0.32.0 and 0.12.0 on CPU), innermost frame first, as py-spy prints them."""

from __future__ import annotations

import re

from vllmdiag.model.process import Frame

_FRAME = re.compile(r"\s*(?P<name>.+) \((?P<file>.+?)(?::(?P<line>\d+))?\)")


def frames(text: str, *more: str) -> tuple[Frame, ...]:
    """The frames of a stack written as text; `more` are its outer parts."""
    result = []
    for line in "\n".join((text, *more)).splitlines():
        if line.strip():
            found = _FRAME.fullmatch(line)
            assert found is not None, line
            result.append(Frame(name=found["name"], file=found["file"], line=int(found["line"] or 0)))
    return tuple(result)


SPAWNED = """
    BaseProcess.run (multiprocessing/process.py:108)
    BaseProcess._bootstrap (multiprocessing/process.py:314)
    _main (multiprocessing/spawn.py:135)
    spawn_main (multiprocessing/spawn.py:122)
    <module> (<string>:1)
"""
FORKED_ENGINE = """
    BaseProcess.run (multiprocessing/process.py:108)
    BaseProcess._bootstrap (multiprocessing/process.py:314)
    Popen._launch (multiprocessing/popen_fork.py:71)
    Popen.__init__ (multiprocessing/popen_fork.py:19)
    ForkProcess._Popen (multiprocessing/context.py:281)
    BaseProcess.start (multiprocessing/process.py:121)
    CoreEngineProcManager.__init__ (vllm/v1/engine/utils.py:329)
    launch_core_engines (vllm/v1/engine/utils.py:1332)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    MPClient.__init__ (vllm/v1/engine/core_client.py:682)
    AsyncLLM.from_vllm_config (vllm/v1/engine/async_llm.py:255)
    run_server (vllm/entrypoints/launchers/api_server/entry.py:177)
    Runner.run (asyncio/runners.py:118)
    run (uvloop/__init__.py:92)
    ServeSubcommand.cmd (vllm/entrypoints/cli/serve.py:156)
    main (vllm/entrypoints/cli/main.py:120)
    <module> (vllm:6)
"""
FORKED_WORKER = """
    WorkerProc.make_worker_process (vllm/v1/executor/multiproc_executor.py:755)
    MultiprocExecutor._init_executor (vllm/v1/executor/multiproc_executor.py:196)
    WorkerProc.wait_for_ready (vllm/v1/executor/multiproc_executor.py:799)
    EngineCore.__init__ (vllm/v1/engine/core.py:144)
    EngineCoreProc.run_engine_core (vllm/v1/engine/core.py:1482)
"""

API_MAIN = """
    ServeSubcommand.cmd (vllm/entrypoints/cli/serve.py:156)
    main (vllm/entrypoints/cli/main.py:120)
    <module> (vllm:6)
"""
API_IDLE = """
    Runner.run (asyncio/runners.py:118)
    run (uvloop/__init__.py:92)
"""
API_WAIT_ENGINE_START = """
    Poller.poll (zmq/sugar/poll.py:106)
    wait_for_engine_startup (vllm/v1/engine/utils.py:1398)
    launch_core_engines (vllm/v1/engine/utils.py:1351)
    _GeneratorContextManager.__exit__ (contextlib.py:144)
    MPClient.__init__ (vllm/v1/engine/core_client.py:682)
    AsyncMPClient.__init__ (vllm/v1/engine/core_client.py:1120)
    instrument_otel.<locals>.sync_wrapper (vllm/tracing/otel.py:175)
    EngineCoreClient.make_async_mp_client (vllm/v1/engine/core_client.py:167)
    AsyncLLM.__init__ (vllm/v1/engine/async_llm.py:184)
    AsyncLLM.from_vllm_config (vllm/v1/engine/async_llm.py:255)
    build_async_engine_client_from_engine_args (vllm/entrypoints/launchers/api_server/entry.py:95)
    run_server (vllm/entrypoints/launchers/api_server/entry.py:177)
    run.<locals>.wrapper (uvloop/__init__.py:48)
    Runner.run (asyncio/runners.py:118)
    run (uvloop/__init__.py:92)
"""
API_WAIT_ENGINE_READY = """
    Poller.poll (zmq/sugar/poll.py:106)
    Socket.poll (zmq/sugar/socket.py:1106)
    MPClient.__init__ (vllm/v1/engine/core_client.py:739)
    AsyncMPClient.__init__ (vllm/v1/engine/core_client.py:1120)
    DPAsyncMPClient.__init__ (vllm/v1/engine/core_client.py:1435)
    EngineCoreClient.make_async_mp_client (vllm/v1/engine/core_client.py:163)
    AsyncLLM.__init__ (vllm/v1/engine/async_llm.py:184)
    run_server_worker (vllm/entrypoints/launchers/api_server/entry.py:195)
    Runner.run (asyncio/runners.py:118)
    run (uvloop/__init__.py:92)
    run_api_server_worker_proc (vllm/v1/utils.py:527)
"""
LAUNCHER = """
    _PollLikeSelector.select (selectors.py:415)
    wait (multiprocessing/connection.py:947)
    wait_for_completion_or_failure (vllm/v1/utils.py:578)
    run_multi_api_server (vllm/entrypoints/cli/serve.py:386)
"""
HEADLESS = """
    _PollLikeSelector.select (selectors.py:415)
    wait (multiprocessing/connection.py:947)
    CoreEngineProcManager.monitor_engine_liveness (vllm/v1/engine/utils.py:356)
    run_headless (vllm/entrypoints/cli/serve.py:259)
"""
COORDINATOR = """
    DPCoordinatorProc.process_input_socket (vllm/v1/engine/coordinator.py:249)
    DPCoordinatorProc.run_coordinator (vllm/v1/engine/coordinator.py:185)
"""
TRACKER = """
    main (multiprocessing/resource_tracker.py:227)
    <module> (<string>:1)
"""

ENGINE_LOOP = """
    EngineCoreProc.run_busy_loop (vllm/v1/engine/core.py:1551)
    fault_tolerant_wrapper.<locals>.run_with_fault_tolerance (vllm/v1/fault_tolerance/engine_core_sentinel.py:178)
    EngineCoreProc.run_engine_core (vllm/v1/engine/core.py:1496)
"""
ENGINE_IDLE = """
    Condition.wait (threading.py:327)
    Queue.get (queue.py:171)
    EngineCoreProc._process_input_queue (vllm/v1/engine/core.py:1588)
"""
READ = """
    Poller.poll (zmq/sugar/poll.py:106)
    SpinCondition.wait (vllm/distributed/device_communicators/shm_broadcast.py:210)
    MessageQueue.acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:864)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    MessageQueue.dequeue (vllm/distributed/device_communicators/shm_broadcast.py:971)
"""
READ_SPINNING = """
    sched_yield (vllm/distributed/utils.py:48)
    SpinTimer.spin (vllm/distributed/device_communicators/shm_broadcast.py:67)
    MessageQueue.acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:487)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    MessageQueue.dequeue (vllm/distributed/device_communicators/shm_broadcast.py:571)
"""
READ_0_8 = """
    sched_yield (vllm/distributed/device_communicators/shm_broadcast.py:41)
    acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:428)
    __enter__ (contextlib.py:137)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:483)
"""
READ_REMOTE = """
    Poller.poll (zmq/sugar/poll.py:106)
    Socket.poll (zmq/sugar/socket.py:1106)
    MessageQueue.recv (vllm/distributed/device_communicators/shm_broadcast.py:996)
    MessageQueue.dequeue (vllm/distributed/device_communicators/shm_broadcast.py:985)
"""
RESPONSE = """
    MultiprocExecutor.collective_rpc.<locals>.get_response (vllm/v1/executor/multiproc_executor.py:440)
    FutureWrapper._wait_for_response (vllm/v1/executor/multiproc_executor.py:103)
    FutureWrapper.result (vllm/v1/executor/multiproc_executor.py:98)
    MultiprocExecutor.collective_rpc (vllm/v1/executor/multiproc_executor.py:455)
    EngineCore.collective_rpc (vllm/v1/engine/core.py:1080)
    EngineCoreProc._invoke_utility_method (vllm/v1/engine/core.py:1740)
    EngineCoreProc._handle_client_request (vllm/v1/engine/core.py:1700)
    EngineCoreProc._process_input_queue (vllm/v1/engine/core.py:1589)
"""
RESPONSE_0_12 = """
    MultiprocExecutor.collective_rpc.<locals>.get_response (vllm/v1/executor/multiproc_executor.py:338)
    FutureWrapper.wait_for_response (vllm/v1/executor/multiproc_executor.py:84)
    FutureWrapper.result (vllm/v1/executor/multiproc_executor.py:79)
    EngineCore.step (vllm/v1/engine/core.py:346)
    EngineCoreProc._process_engine_step (vllm/v1/engine/core.py:892)
"""
RESPONSE_0_8 = """
    collective_rpc (vllm/v1/executor/multiproc_executor.py:180)
    execute_model (vllm/v1/executor/multiproc_executor.py:146)
    step (vllm/v1/engine/core.py:214)
    _process_engine_step (vllm/v1/engine/core.py:420)
"""
RESPONSE_0_10_PIPELINE = """
    wait (threading.py:327)
    result (concurrent/futures/_base.py:451)
    step_with_batch_queue (vllm/v1/engine/core.py:330)
"""
WRITE = """
    sched_yield (vllm/distributed/utils.py:46)
    MessageQueue.acquire_write (vllm/distributed/device_communicators/shm_broadcast.py:741)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    MessageQueue.enqueue (vllm/distributed/device_communicators/shm_broadcast.py:945)
    MultiprocExecutor.collective_rpc (vllm/v1/executor/multiproc_executor.py:427)
    EngineCore.collective_rpc (vllm/v1/engine/core.py:1080)
    EngineCoreProc._handle_client_request (vllm/v1/engine/core.py:1700)
    EngineCoreProc._process_input_queue (vllm/v1/engine/core.py:1589)
"""
ENGINE_INIT = """
    instrument_otel.<locals>.sync_wrapper (vllm/tracing/otel.py:175)
    EngineCoreProc.run_engine_core (vllm/v1/engine/core.py:1482)
"""
WAIT_FOR_READY = """
    _PollLikeSelector.select (selectors.py:415)
    wait (multiprocessing/connection.py:947)
    WorkerProc.wait_for_ready (vllm/v1/executor/multiproc_executor.py:799)
    MultiprocExecutor._init_executor (vllm/v1/executor/multiproc_executor.py:215)
    Executor.__init__ (vllm/v1/executor/abstract.py:126)
    EngineCore.__init__ (vllm/v1/engine/core.py:144)
    EngineCoreProc.__init__ (vllm/v1/engine/core.py:1194)
"""
HANDSHAKE = """
    Poller.poll (zmq/sugar/poll.py:106)
    Socket.poll (zmq/sugar/socket.py:1106)
    EngineCoreProc.startup_handshake (vllm/v1/engine/core.py:1372)
    EngineCoreProc._perform_handshake (vllm/v1/engine/core.py:1333)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    EngineCoreProc.__init__ (vllm/v1/engine/core.py:1164)
"""
WAIT_COORDINATOR = """
    Condition.wait (threading.py:331)
    Event.wait (threading.py:629)
    EngineCoreProc.__init__ (vllm/v1/engine/core.py:1243)
"""

WORKER_LOOP = """
    WorkerProc.worker_busy_loop (vllm/v1/executor/multiproc_executor.py:1041)
    WorkerProc.worker_main (vllm/v1/executor/multiproc_executor.py:944)
"""
WORKER_RPC = """
    WorkerProc._execute_worker_rpc (vllm/v1/executor/multiproc_executor.py:1055)
"""
WORKER_STEP = """
    LlamaModel.forward (vllm/model_executor/models/llama.py:427)
    _support_torch_compile.<locals>.__call__ (vllm/compilation/decorators.py:360)
    Module._call_impl (torch/nn/modules/module.py:1786)
    GPUModelRunner.execute_model (vllm/v1/worker/gpu_model_runner.py:2995)
    context_decorator.<locals>.decorate_context (torch/utils/_contextlib.py:120)
    Worker.execute_model (vllm/v1/worker/gpu_worker.py:591)
    WorkerWrapperBase.execute_model (vllm/v1/worker/worker_base.py:369)
"""
ALL_REDUCE_SHM = """
    OpOverloadPacket.__call__ (torch/_ops.py:1269)
    _CPUSHMDistributed.all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:261)
    CpuCommunicator.all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:58)
    GroupCoordinator._all_reduce_out_place (vllm/distributed/parallel_state.py:507)
    GroupCoordinator.all_reduce (vllm/distributed/parallel_state.py:502)
"""
ALL_REDUCE_GLOO = """
    all_reduce (torch/distributed/distributed_c10d.py:2942)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:81)
    CpuCommunicator.all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:36)
    GroupCoordinator.all_reduce (vllm/distributed/parallel_state.py:502)
"""
WAIT_UNTIL_READY = """
    MessageQueue.wait_until_ready (vllm/distributed/device_communicators/shm_broadcast.py:703)
    WorkerProc.worker_main (vllm/v1/executor/multiproc_executor.py:939)
"""
RENDEZVOUS = """
    _create_c10d_store (torch/distributed/rendezvous.py:199)
    _tcp_rendezvous_handler (torch/distributed/rendezvous.py:232)
    init_process_group (torch/distributed/distributed_c10d.py:1892)
    _time_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:97)
    init_distributed_environment (vllm/distributed/parallel_state.py:1953)
    init_worker_distributed_environment (vllm/v1/worker/gpu_worker.py:1664)
    CPUWorker.init_device (vllm/v1/worker/cpu_worker.py:154)
    WorkerProc.__init__ (vllm/v1/executor/multiproc_executor.py:679)
    WorkerProc.worker_main (vllm/v1/executor/multiproc_executor.py:920)
"""
IMPORTING = """
    updatecache (linecache.py:137)
    JITCallable.__init__ (triton/runtime/jit.py:478)
    <module> (triton/language/standard.py:25)
    _call_with_frames_removed (<frozen importlib._bootstrap>:241)
    _LoaderBasics.exec_module (<frozen importlib._bootstrap_external>:940)
    _load_unlocked (<frozen importlib._bootstrap>:690)
    _find_and_load (<frozen importlib._bootstrap>:1176)
    <module> (vllm/__init__.py:14)
    _fixup_main_from_path (multiprocessing/spawn.py:297)
    prepare (multiprocessing/spawn.py:246)
    _main (multiprocessing/spawn.py:131)
    spawn_main (multiprocessing/spawn.py:122)
    <module> (<string>:1)
"""
THREAD = """
    Thread.run (threading.py:982)
    Thread._bootstrap_inner (threading.py:1045)
    Thread._bootstrap (threading.py:1002)
"""

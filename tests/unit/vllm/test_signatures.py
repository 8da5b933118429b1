from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.vllm import stacks
from tests.unit.vllm.stacks import frames
from vllmdiag.model.process import Frame
from vllmdiag.vllm.signatures import match, signatures, state_of

S = stacks


def state(role: str, *parts: str) -> tuple[str, str] | None:
    found = state_of(frames(*parts), role)
    return (found.signature.id, found.signature.kind) if found else None


CASES = {
    "API server idle": ("APIServer", (S.API_IDLE, S.API_MAIN), "api.idle"),
    "API server waits for HELLO": ("APIServer", (S.API_WAIT_ENGINE_START, S.API_MAIN), "api.wait_engine_start"),
    "API server waits for READY": ("APIServer", (S.API_WAIT_ENGINE_READY, S.SPAWNED), "api.wait_engine_ready"),
    "parent of several servers": ("Launcher", (S.LAUNCHER, S.API_MAIN), "launcher.idle"),
    "headless parent": ("Launcher", (S.HEADLESS, S.API_MAIN), "launcher.idle"),
    "coordinator waits for engines": ("DPCoordinator", (S.COORDINATOR, S.SPAWNED), "coordinator.wait_engines"),
    "coordinator idle": (
        "DPCoordinator",
        ("    Poller.poll (zmq/sugar/poll.py:106)", S.COORDINATOR, S.SPAWNED),
        "coordinator.idle",
    ),
    "resource tracker": ("ResourceTracker", (S.TRACKER,), "resource_tracker.read"),
    "engine idle": ("EngineCore", (S.ENGINE_IDLE, S.ENGINE_LOOP, S.SPAWNED), "engine.idle"),
    "engine idle, forked": ("EngineCore", (S.ENGINE_IDLE, S.ENGINE_LOOP, S.FORKED_ENGINE), "engine.idle"),
    "engine waits for a worker": ("EngineCore", (S.READ, S.RESPONSE, S.ENGINE_LOOP, S.SPAWNED), "engine.wait_worker"),
    "engine waits for a worker, 0.12": (
        "EngineCore",
        (S.READ_SPINNING, S.RESPONSE_0_12, S.ENGINE_LOOP, S.SPAWNED),
        "engine.wait_worker",
    ),
    "engine waits for a worker, 0.8": (
        "EngineCore",
        (S.READ_0_8, S.RESPONSE_0_8, S.ENGINE_LOOP, S.SPAWNED),
        "engine.wait_worker",
    ),
    "engine waits for a worker, 0.10 with a pipeline": (
        "EngineCore",
        (S.RESPONSE_0_10_PIPELINE, S.ENGINE_LOOP, S.SPAWNED),
        "engine.wait_worker",
    ),
    "engine waits for a worker of another node": (
        "EngineCore",
        (S.READ_REMOTE, S.RESPONSE, S.ENGINE_LOOP, S.SPAWNED),
        "engine.wait_worker",
    ),
    "engine finds the ring full": ("EngineCore", (S.WRITE, S.ENGINE_LOOP, S.SPAWNED), "mq.acquire_write"),
    "engine waits for its workers to start": (
        "EngineCore",
        (S.WAIT_FOR_READY, S.ENGINE_INIT, S.SPAWNED),
        "engine.wait_worker_start",
    ),
    "engine waits for addresses": ("EngineCore", (S.HANDSHAKE, S.ENGINE_INIT, S.SPAWNED), "engine.handshake"),
    "engine waits for the coordinator": (
        "EngineCore",
        (S.WAIT_COORDINATOR, S.ENGINE_INIT, S.SPAWNED),
        "engine.wait_coordinator",
    ),
    "worker idle": ("Worker", (S.READ, S.WORKER_LOOP, S.SPAWNED), "worker.idle"),
    "worker idle, 0.12": ("Worker", (S.READ_SPINNING, S.WORKER_LOOP, S.SPAWNED), "worker.idle"),
    "worker idle, forked": ("Worker", (S.READ, S.WORKER_LOOP, S.FORKED_ENGINE, S.FORKED_WORKER), "worker.idle"),
    "worker idle on another node": ("Worker", (S.READ_REMOTE, S.WORKER_LOOP, S.SPAWNED), "worker.idle"),
    "Ray worker with a ring, idle": ("RayWorker", (S.READ, S.WORKER_LOOP), "worker.idle"),
    "worker in all_reduce over shared memory": (
        "Worker",
        (S.ALL_REDUCE_SHM, S.WORKER_STEP, S.WORKER_RPC, S.WORKER_LOOP, S.SPAWNED),
        "cpu.collective",
    ),
    "worker in all_reduce over gloo": (
        "Worker",
        (S.ALL_REDUCE_GLOO, S.WORKER_STEP, S.WORKER_LOOP, S.SPAWNED),
        "torch.pg_wait",
    ),
    "worker computes": ("Worker", (S.WORKER_STEP, S.WORKER_RPC, S.WORKER_LOOP, S.SPAWNED), "worker.busy"),
    "worker runs a method of the user": (
        "Worker",
        ("    LabExt.lab_sleep (labext.py:10)", S.WORKER_RPC, S.WORKER_LOOP, S.SPAWNED),
        "worker.busy",
    ),
    "worker waits for its writer": ("Worker", (S.WAIT_UNTIL_READY, S.SPAWNED), "mq.handshake"),
    "worker waits for the other ranks": ("Worker", (S.RENDEZVOUS, S.SPAWNED), "store.rendezvous"),
    "child imports": ("Child", (S.IMPORTING,), "import"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_recorded_stack_has_its_state(case: tuple[str, tuple[str, ...], str]) -> None:
    role, parts, expected = case
    found = state(role, *parts)
    assert found is not None
    assert found[0] == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_state_is_the_same_on_python_3_10_where_names_are_bare(case: tuple[str, tuple[str, ...], str]) -> None:
    role, parts, expected = case
    bare = [
        Frame(name=re.sub(r"^.*\.(?=[\w<])", "", frame.name), file=frame.file, line=frame.line)
        for frame in frames(*parts)
    ]
    found = state_of(bare, role)
    assert found is not None
    assert found.signature.id == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_state_is_the_same_in_a_source_checkout(case: tuple[str, tuple[str, ...], str]) -> None:
    role, parts, expected = case
    longer = [
        Frame(name=frame.name, file=frame.file if frame.file.startswith("<") else f"/src/checkout/{frame.file}")
        for frame in frames(*parts)
    ]
    found = state_of(longer, role)
    assert found is not None
    assert found.signature.id == expected


def test_a_group_ring_that_is_read_inside_a_step_is_not_an_idle_worker() -> None:
    inner = "    MessageQueue.broadcast_object (vllm/distributed/device_communicators/shm_broadcast.py:1003)"
    assert state("Worker", S.READ, inner, S.WORKER_STEP, S.WORKER_LOOP) == ("group.read", "collective")


def test_an_unknown_reader_of_a_ring_waits_for_its_writer() -> None:
    assert state("", S.READ, "    <module> (st.py:17)") == ("mq.acquire_read", "wait_response")


def test_frames_of_the_parent_below_a_fork_are_ignored() -> None:
    found = match(frames(S.READ, S.WORKER_LOOP, S.FORKED_ENGINE, S.FORKED_WORKER), "Worker")
    assert not {m.signature.id for m in found} & {"engine.wait_worker_start", "engine.start", "api.idle"}


def test_an_api_server_inside_a_callback_is_not_idle() -> None:
    assert state("APIServer", "    render (jinja2/environment.py:1291)", S.API_IDLE) == ("api.busy", "busy")


def test_native_frames_do_not_hide_an_idle_event_loop() -> None:
    native = "    epoll_wait (libc.so.6)\n    uv__io_poll (uvloop/loop.cpython-311-x86_64-linux-gnu.so)"
    assert state("APIServer", native, S.API_IDLE) == ("api.idle", "idle")


def test_a_native_wait_inside_a_torch_call_is_the_state() -> None:
    native = "    gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)"
    python = "    recv (torch/distributed/distributed_c10d.py:2799)"
    assert state("Worker", native, python, S.WORKER_LOOP) == ("gloo.recv", "collective")


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("cuEventSynchronize (libcuda.so.1)", ("cuda.event_sync", "gpu_wait")),
        ("cudaStreamSynchronize (libcudart.so.12)", ("cuda.stream_sync", "gpu_wait")),
        ("cuLaunchKernelExC (libcuda.so.1)", ("cuda.launch_blocked", "gpu_wait")),
        ("replay (torch/cuda/graphs.py:88)", ("cuda.graph_replay", "gpu_wait")),
        ("ncclGroupEndInternal (libnccl.so.2)", ("nccl.launch", "collective")),
        ("all_reduce (vllm/distributed/device_communicators/pynccl.py:137)", ("pynccl.call", "collective")),
        ("FileBaton.wait (torch/utils/file_baton.py:50)", ("lock.file", "lock")),
        ("Handler.acquire (logging/__init__.py:927)", ("log.lock", "lock")),
        ("_ModuleLock.acquire (<frozen importlib._bootstrap>:120)", ("import.lock", "lock")),
        ("make_cubin (triton/backends/nvidia/compiler.py:400)", ("jit.triton", "compiling")),
        ("run (triton/runtime/jit.py:591)", ("worker.busy", "busy")),
        ("snapshot_download (huggingface_hub/_snapshot_download.py:296)", ("download", "download")),
        (
            "safetensors_weights_iterator (vllm/model_executor/model_loader/weight_utils.py:700)",
            ("load.weights", "loading"),
        ),
    ],
)
def test_what_stands_innermost_in_a_step_decides(inner: str, expected: tuple[str, str]) -> None:
    assert state("Worker", f"    {inner}", S.WORKER_STEP, S.WORKER_LOOP) == expected


@pytest.mark.parametrize(
    ("role", "name", "stack", "expected"),
    [
        (
            "EngineCore",
            "Thread-1 (process_input_sockets)",
            "Poller.poll (zmq/sugar/poll.py:106)\nEngineCoreProc.process_input_sockets (vllm/v1/engine/core.py:1888)",
            "engine.io_threads",
        ),
        (
            "EngineCore",
            "Thread-1 (process_input_socket)",
            "poll (zmq/sugar/poll.py:106)\nprocess_input_socket (vllm/v1/engine/core.py:450)",
            "engine.io_threads",
        ),
        (
            "EngineCore",
            "Thread-2 (process_output_sockets)",
            "Queue.get (queue.py:171)\nEngineCoreProc.process_output_sockets (vllm/v1/engine/core.py:1968)",
            "engine.io_threads",
        ),
        (
            "EngineCore",
            "signal-callback",
            "Event.wait (threading.py:629)\nSignalCallback._run (vllm/v1/engine/utils.py:395)",
            "thread.signal",
        ),
        (
            "APIServer",
            "MPClientEngineMonitor",
            "liveness (vllm/v1/engine/utils.py:356)\nmonitor_engine_cores (vllm/v1/engine/core_client.py:812)",
            "thread.engine_watch",
        ),
        (
            "Worker",
            "WorkerAsyncOutputCopy",
            "Queue.get (queue.py:171)\nWorkerProc.async_output_busy_loop (vllm/v1/executor/multiproc_executor.py:1037)",
            "worker.output_idle",
        ),
        ("APIServer", "ThreadPoolExecutor-4_0", "_worker (concurrent/futures/thread.py:81)", "thread.pool"),
    ],
)
def test_the_helper_threads_are_known(role: str, name: str, stack: str, expected: str) -> None:
    found = state(role, stack, S.THREAD)
    assert found == (expected, "io_thread"), name


def test_a_pool_thread_with_work_is_not_called_idle() -> None:
    work = "    TokenizersBackend._decode (transformers/tokenization_utils_tokenizers.py:800)"
    assert state("APIServer", work, "    _worker (concurrent/futures/thread.py:83)", S.THREAD) is None


def test_the_output_copy_thread_that_waits_for_the_gpu_is_a_gpu_wait() -> None:
    stack = (
        "Event.synchronize (torch/cuda/streams.py:225)\nget_output (vllm/v1/worker/gpu_model_runner.py:240)\n"
        "WorkerProc.async_output_busy_loop (vllm/v1/executor/multiproc_executor.py:1038)"
    )
    assert state("Worker", stack, S.THREAD) == ("cuda.event_sync", "gpu_wait")


def test_matches_come_innermost_first() -> None:
    found = match(frames(S.READ, S.RESPONSE, S.ENGINE_LOOP), "EngineCore")
    assert [m.depth for m in found] == sorted(m.depth for m in found)
    assert [m.signature.id for m in found][:3] == ["zmq.poll", "mq.acquire_read", "engine.wait_worker"]


def test_a_kernel_function_is_found_as_a_frame_without_a_file() -> None:
    found = state_of([Frame(name="uvm_spin_loop", file="")], "Worker")
    assert found is not None
    assert found.signature.id == "kernel.uvm"


def test_an_unknown_stack_has_no_state() -> None:
    assert state("Worker", "    f (my.py:1)\n    <module> (my.py:2)") is None
    assert match((), "Worker") == ()


def test_the_table_is_consistent() -> None:
    ids = [signature.id for signature in signatures()]
    assert len(ids) == len(set(ids))
    for signature in signatures():
        assert signature.any
        assert signature.meaning
        assert signature.source
        assert set(signature.refines) <= set(ids), signature.id


FRAME = st.builds(Frame, name=st.text(max_size=40), file=st.text(max_size=40))
KNOWN = st.sampled_from(frames(S.READ, S.RESPONSE, S.IMPORTING, S.RENDEZVOUS, S.ALL_REDUCE_GLOO, S.API_IDLE, S.SPAWNED))


@given(st.lists(FRAME | KNOWN, max_size=30), st.sampled_from(["", "Worker", "EngineCore", "APIServer", "Child", "x"]))
def test_any_stack_is_accepted_and_context_never_decides(stack: list[Frame], role: str) -> None:
    found = state_of(stack, role)
    assert found is None or found.signature.kind != "context"

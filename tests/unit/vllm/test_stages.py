"""Stages by the stack: recorded ones, the order of a start, and what is no stage."""

from __future__ import annotations

import re

import pytest

from vllmdiag.model.process import Frame
from vllmdiag.vllm.stages import (
    READY_ORDER,
    is_lock_file,
    is_network_filesystem,
    shard_of,
    shim_in,
    socket_path_bytes,
    stage_of,
    stages,
    start_method,
    unix_path_limit,
)

CORE, EXECUTOR = "vllm/v1/engine/core.py", "vllm/v1/executor/multiproc_executor.py"


def stack(*frames: str) -> tuple[Frame, ...]:
    """``function (file)`` each, innermost first."""
    found = [re.fullmatch(r"(\S+) \((\S+|<.*>)\)", frame) for frame in frames]
    return tuple(Frame(name=m[1], file=m[2]) for m in found if m)


CASES = [
    ("APIServer", "server.wait_engines", ["Poller.poll (zmq/sugar/poll.py)",
     "wait_for_engine_startup (vllm/v1/engine/utils.py)", "launch_core_engines (vllm/v1/engine/utils.py)",
     "MPClient.__init__ (vllm/v1/engine/core_client.py)"]),
    ("APIServer", "server.wait_ready", ["Socket.poll (zmq/sugar/socket.py)",
     "MPClient.__init__ (vllm/v1/engine/core_client.py)"]),
    ("APIServer", "server.inspect", ["run (subprocess.py)",
     "_run_in_subprocess (vllm/model_executor/models/registry.py)",
     "EngineArgs.create_engine_config (vllm/engine/arg_utils.py)"]),
    ("EngineCore", "engine.handshake", ["Socket.poll (zmq/sugar/socket.py)",
     f"EngineCoreProc.startup_handshake ({CORE})", f"EngineCoreProc.__init__ ({CORE})"]),
    ("EngineCore", "engine.coordinator", ["Event.wait (threading.py)", f"EngineCoreProc.__init__ ({CORE})"]),
    ("EngineCore", "engine.wait_workers", ["wait (multiprocessing/connection.py)",
     f"WorkerProc.wait_for_ready ({EXECUTOR})", f"MultiprocExecutor._init_executor ({EXECUTOR})"]),
    ("EngineCore", "engine.memory", [f"MultiprocExecutor.collective_rpc ({EXECUTOR})",
     f"EngineCore._initialize_kv_caches ({CORE})", f"EngineCore.__init__ ({CORE})"]),
    ("EngineCore", "engine.loop", ["Queue.get (queue.py)", f"EngineCoreProc._process_input_queue ({CORE})"]),
    ("Worker", "worker.meet", ["_create_c10d_store (torch/distributed/rendezvous.py)",
     "init_process_group (torch/distributed/distributed_c10d.py)",
     "init_distributed_environment (vllm/distributed/parallel_state.py)"]),
    ("Worker", "worker.weights", ["safetensors_weights_iterator (vllm/model_executor/model_loader/weight_utils.py)",
     "CPUWorker.load_model (vllm/v1/worker/cpu_worker.py)"]),
    ("Worker", "worker.compile", ["compile_fx (torch/_inductor/compile_fx.py)",
     "profile_run (vllm/v1/worker/gpu_model_runner.py)"]),
    ("Worker", "worker.capture", ["_dummy_run_of_another (x.py)", "capture_model (vllm/v1/worker/gpu_model_runner.py)",
     "compile_or_warm_up_model (vllm/v1/worker/gpu_worker.py)"]),
    ("EngineCore", "worker.weights", ["load_weights (vllm/model_executor/models/llama.py)",
     "Worker.load_model (vllm/v1/worker/gpu_worker.py)", f"EngineCore.__init__ ({CORE})"]),
    ("Child", "import", ["get_data (<frozen importlib._bootstrap_external>)", "_main (multiprocessing/spawn.py)"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "expected", "frames"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_stage_is_that_of_the_innermost_frame_that_is_one(role: str, expected: str, frames: list[str]) -> None:
    found = stage_of(stack(*frames), role)
    assert found is not None
    assert found.id == expected


def test_an_import_within_a_stage_is_that_stage() -> None:
    found = stage_of(
        stack("get_data (<frozen importlib._bootstrap_external>)", "load_model (vllm/v1/worker/w.py)"), "Worker"
    )
    assert found is not None
    assert found.id == "worker.model"


def test_a_stack_of_strangers_shows_no_stage() -> None:
    assert stage_of(stack("main (app.py)"), "Worker") is None
    assert stage_of((), "Worker") is None


def test_a_forked_child_is_not_in_the_stage_of_its_parent() -> None:
    frames = stack(
        "main (app.py)", "BaseProcess._bootstrap (multiprocessing/process.py)", f"wait_for_ready ({EXECUTOR})"
    )
    assert stage_of(frames, "EngineCore") is None


def test_ids_are_unique_and_every_role_ends_ready() -> None:
    ids = [stage.id for stage in stages()]
    assert len(set(ids)) == len(ids)
    for role in ("EngineCore", "Worker", "DPCoordinator"):
        assert max(stage.order for stage in stages() if role in stage.roles) >= READY_ORDER
    assert all(stage.source and stage.name and stage.any for stage in stages())


def test_the_start_method_is_read_from_the_bottom_of_a_stack() -> None:
    spawned = stack(
        "main (a.py)",
        "BaseProcess._bootstrap (multiprocessing/process.py)",
        "_main (multiprocessing/spawn.py)",
        "spawn_main (multiprocessing/spawn.py)",
    )
    forked = stack("main (a.py)", "BaseProcess._bootstrap (multiprocessing/process.py)",
                   "Popen._launch (multiprocessing/popen_fork.py)", "run (app.py)")  # fmt: skip
    assert (start_method(spawned), start_method(forked), start_method(stack("main (a.py)"))) == ("spawn", "fork", "")


def test_names_of_files_tell_shards_locks_and_shims() -> None:
    assert shard_of("/m/model-00002-of-00004.safetensors") == (2, 4)
    assert shard_of("/m/model.safetensors") is None
    assert is_lock_file("/c/abc.lock")
    assert is_lock_file("/c/ext/lock")
    assert not is_lock_file("/c/block")
    found = shim_in(["/usr/lib/libcuda.so.1", "/usr/local/vgpu/libvgpu.so"])
    assert found is not None
    assert found[0] == "/usr/local/vgpu/libvgpu.so"
    assert shim_in(["/usr/lib/libcuda.so.1"]) is None
    assert is_network_filesystem("nfs4")
    assert not is_network_filesystem("ext4")


def test_the_longest_base_path_that_works_has_70_bytes() -> None:
    assert socket_path_bytes("x" * 70) == unix_path_limit()
    assert socket_path_bytes("ä" * 36) > unix_path_limit()

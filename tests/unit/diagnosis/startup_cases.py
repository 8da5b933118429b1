"""Start-ups that stand, and their look-alikes: cause by cause, for the table of test_causes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllmdiag.model.process import ProcessSample
from vllmdiag.model.snapshot import LogLine
from vllmdiag.model.startup import Checkpoint, FileLock, Interface, Network, TakenPort

from .scenario import (
    _BOOT,
    API,
    API_WAITS_START,
    CORE,
    ENGINE,
    ENGINE_WAITS_START,
    EXECUTOR,
    TIMES,
    WORKER0,
    WORKER_IDLE,
    WORKER_IN_STORE,
    Server,
    Stack,
)

Scenario = Callable[[Server], None]
W0, W1 = WORKER0, WORKER0 + 1
_START: Stack = (("WorkerProc.__init__", EXECUTOR), ("WorkerProc.worker_main", EXECUTOR), *_BOOT)
_LOADER = "vllm/model_executor/model_loader/default_loader.py"
LOADS: Stack = (
    ("safetensors_weights_iterator", "vllm/model_executor/model_loader/weight_utils.py"),
    ("LlamaForCausalLM.load_weights", "vllm/model_executor/models/llama.py"),
    ("DefaultModelLoader.load_weights", _LOADER),
    ("Worker.load_model", "vllm/v1/worker/gpu_worker.py"),
    *_START,
)
WARMS_UP: Stack = (
    ("flashinfer_sample", "vllm/v1/sample/ops/topk_topp_sampler.py"),
    ("warmup_kernels", "vllm/v1/worker/gpu/warmup.py"),
    ("Worker.compile_or_warm_up_model", "vllm/v1/worker/gpu_worker.py"),
    *_START,
)
WAITS_LOCK: Stack = (
    ("BaseFileLock.acquire", "filelock/_api.py"),
    ("CppPythonBindingsCodeCache.load", "torch/_inductor/codecache.py"),
    ("compile_fx_inner", "torch/_inductor/compile_fx.py"),
    ("GPUModelRunner.profile_run", "vllm/v1/worker/gpu_model_runner.py"),
    *_START,
)
COMPILES: Stack = (
    ("AsyncCompile.wait", "torch/_inductor/async_compile.py"),
    ("compile_fx_inner", "torch/_inductor/compile_fx.py"),
    ("GPUModelRunner.profile_run", "vllm/v1/worker/gpu_model_runner.py"),
    *_START,
)
IN_NCCL: Stack = (
    ("NCCLLibrary.ncclCommInitRank", "vllm/distributed/device_communicators/pynccl_wrapper.py"),
    ("PyNcclCommunicator.__init__", "vllm/distributed/device_communicators/pynccl.py"),
    ("init_model_parallel_group", "vllm/distributed/parallel_state.py"),
    ("Worker.init_device", "vllm/v1/worker/gpu_worker.py"),
    *_START,
)
SAYS_HELLO: Stack = (
    ("Socket.poll", "zmq/sugar/socket.py"),
    ("EngineCoreProc.startup_handshake", CORE),
    ("EngineCoreProc._perform_handshakes", CORE),
    ("EngineCoreProc.__init__", CORE),
    *_BOOT,
)
WAITS_FOR_RAY: Stack = (
    ("wait", "ray/_private/worker.py"),
    ("_wait_until_pg_ready", "vllm/v1/executor/ray_utils.py"),
    ("initialize_ray_cluster", "vllm/v1/executor/ray_utils.py"),
    ("EngineCoreProc.__init__", CORE),
    *_BOOT,
)
IMPORTS: Stack = (
    ("FileLoader.get_data", "<frozen importlib._bootstrap_external>"),
    ("_find_and_load", "<frozen importlib._bootstrap>"),
    ("_main", "multiprocessing/spawn.py"),
)
NETWORK = Network(
    netns=1,
    pids=(API, ENGINE, W0, W1),
    interfaces=(Interface(name="lo", addresses=("127.0.0.1",)), Interface(name="eth0", addresses=("10.0.0.5",))),
)
LOCK = FileLock(path="/cache/x.lock", kind="FLOCK", holder=999, holder_comm="python3")
TAKEN = TakenPort(port=8000, purpose="HTTP", address="0.0.0.0", pids=(999,), name="nginx")
LONG_PATH = "/p/scratch/project-long-name/users/someone/very/deep/job/directories/run-2026-06-04-0001/tmp"


def stands(server: Server, worker0: Stack, worker1: Stack) -> None:
    """Nobody serves, the engine waits for its workers, and these are in the given stacks."""
    server.stacks = {API: API_WAITS_START, ENGINE: ENGINE_WAITS_START, W0: worker0, W1: worker1}
    server.listening = False


def _log(text: str) -> tuple[LogLine, ...]:
    return (LogLine(file="/var/log/vllm.log", number=0, text=text),)


def at_the_store(server: Server) -> None:
    stands(server, WORKER_IN_STORE, WORKER_IN_STORE)


def one_rank_still_imports(server: Server) -> None:
    stands(server, WORKER_IN_STORE, IMPORTS)
    server.cpu = {W1: 0.7}


def says_hello_to_nobody(server: Server) -> None:
    server.stacks = {API: API_WAITS_START, ENGINE: SAYS_HELLO}
    server.gone = {W0, W1}
    server.listening = False


def loads_nothing(server: Server) -> None:
    stands(server, LOADS, WORKER_IDLE)
    server.processes = {W0: {"wchan": "wait_for_partner"}}


def loads_slowly(server: Server) -> None:
    """No CPU to speak of, and bytes come in."""
    loads_nothing(server)
    samples = tuple(
        ProcessSample(t=t, state="D", utime=5.0, stime=1.0, read_bytes=10**9 + int(t * 4e6), rchar=0) for t in TIMES
    )
    weights = Checkpoint(
        path="/models/m/model-00002-of-00004.safetensors", files=4, bytes=40 * 10**9, before=10**10, size=10**10
    )
    server.processes = {W0: {"samples": samples, "checkpoint": weights}}


def all_in_nccl(server: Server) -> None:
    stands(server, IN_NCCL, IN_NCCL)
    server.cpu = {W0: 1.0, W1: 1.0}  # they spin


def nccl_with_a_shim(server: Server) -> None:
    all_in_nccl(server)
    server.processes = {W0: {"libraries": ("/usr/local/vgpu/libvgpu.so",)}}


def one_rank_before_nccl(server: Server) -> None:
    stands(server, IN_NCCL, IMPORTS)
    server.cpu = {W0: 1.0, W1: 0.7}


def a_shim_that_does_no_harm(server: Server) -> None:
    server.processes = {W0: {"libraries": ("/usr/local/vgpu/libvgpu.so",)}}


def port_taken(server: Server) -> None:
    engine_starts(server)
    server.fields = {"taken_ports": (TAKEN,)}


def engine_starts(server: Server) -> None:
    stands(server, LOADS, LOADS)
    server.cpu = {W0: 1.0, W1: 1.0}


def port_taken_beside_its_own(server: Server) -> None:
    """At every address, and the server at one: the clients of that one still come to it."""
    server.fields = {"taken_ports": (TAKEN,)}


def port_shared(server: Server) -> None:
    server.fields = {"taken_ports": (msgspec.structs.replace(TAKEN, address="127.0.0.1"),)}


def port_shared_with_nobody_to_name(server: Server) -> None:
    """Whose it is could not be seen: perhaps its own."""
    server.fields = {"taken_ports": (msgspec.structs.replace(TAKEN, address="127.0.0.1", pids=()),)}


def wrong_address(server: Server) -> None:
    at_the_store(server)
    server.processes = {API: {"environ": {"VLLM_HOST_IP": "192.0.2.7"}}}
    server.fields = {"networks": (NETWORK,)}


def right_address(server: Server) -> None:
    wrong_address(server)
    server.cpu = {W0: 0.5}
    server.processes = {API: {"environ": {"VLLM_HOST_IP": "10.0.0.5", "GLOO_SOCKET_IFNAME": "eth0"}}}


def long_path(server: Server) -> None:
    engine_starts(server)
    server.fields = {"sockets": ()}  # nothing is bound yet
    server.processes = {API: {"environ": {"VLLM_RPC_BASE_PATH": LONG_PATH}}}


def path_just_short_enough(server: Server) -> None:
    long_path(server)
    server.processes = {API: {"environ": {"VLLM_RPC_BASE_PATH": "/" + "x" * 69}}}


def lock_held_by_a_dead_one(server: Server) -> None:
    stands(server, WAITS_LOCK, WORKER_IDLE)
    server.cpu = {W0: 0.1}  # it polls
    server.fields = {"locks": (LOCK,)}


def lock_held_by_a_mate_that_compiles(server: Server) -> None:
    stands(server, COMPILES, WAITS_LOCK)
    server.cpu = {W0: 0.9}
    server.fields = {"locks": (FileLock(path="/x.lock", kind="FLOCK", holder=W0, holder_state="R"),)}


def nobody_compiles(server: Server) -> None:
    stands(server, COMPILES, WORKER_IDLE)


def somebody_compiles(server: Server) -> None:
    nobody_compiles(server)
    server.cpu = {W0: 0.3}


def forked_after_cuda(server: Server) -> None:
    engine_starts(server)
    server.fields = {"log_lines": _log("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")}


def another_error_of_cuda(server: Server) -> None:
    engine_starts(server)
    server.fields = {"log_lines": _log("RuntimeError: CUDA error: invalid device ordinal")}


def no_placement(server: Server) -> None:
    server.stacks = {API: API_WAITS_START, ENGINE: WAITS_FOR_RAY}
    server.gone = {W0, W1}
    server.listening = False
    server.fields = {"log_lines": _log("Waiting for creating a placement group of specs for 310 seconds. specs=[...]")}


def young_placement(server: Server) -> None:
    no_placement(server)
    server.age = 12.0


def imports_from_nfs(server: Server) -> None:
    server.stacks = {API: API_WAITS_START, ENGINE: IMPORTS}
    server.gone = {W0, W1}
    server.listening = False
    server.cpu = {ENGINE: 0.2}
    server.processes = {ENGINE: {"import_filesystem": "nfs4"}}


def imports_from_a_disk(server: Server) -> None:
    imports_from_nfs(server)
    server.processes = {ENGINE: {"import_filesystem": "ext4"}}


FAULTS: list[tuple[str, Scenario, str, str | None]] = [
    ("handshake-incomplete", says_hello_to_nobody, "EngineCore", "critical"),
    ("startup-barrier", at_the_store, "Worker_TP0", "critical"),
    ("startup-phase-stuck", loads_nothing, "Worker_TP0", "critical"),
    ("nccl-init-stuck", all_in_nccl, "Worker_TP0", "critical"),
    ("preload-shim", nccl_with_a_shim, "Worker_TP0", "critical"),
    ("port-conflict", port_taken, "APIServer", "critical"),
    ("port-conflict", port_shared, "APIServer", "critical"),
    ("wrong-interface", wrong_address, "Worker_TP0", "critical"),
    ("ipc-path-too-long", long_path, "APIServer", "critical"),
    ("jit-lock", lock_held_by_a_dead_one, "Worker_TP0", "critical"),
    ("slow-compile", nobody_compiles, "Worker_TP0", "warning"),
    ("cuda-fork-poisoned", forked_after_cuda, "EngineCore", "critical"),
    ("ray-placement", no_placement, "EngineCore", "critical"),
    ("handshake-timeout-slow-storage", imports_from_nfs, "EngineCore", "warning"),
]
LOOK_ALIKES: list[tuple[str, Scenario, str]] = [
    ("startup-barrier", one_rank_still_imports, "starting"),
    ("startup-phase-stuck", loads_slowly, "starting"),
    ("nccl-init-stuck", one_rank_before_nccl, "starting"),
    ("preload-shim", a_shim_that_does_no_harm, "idle"),
    ("port-conflict", port_taken_beside_its_own, "idle"),
    ("port-conflict", port_shared_with_nobody_to_name, "idle"),
    ("wrong-interface", right_address, "starting"),
    ("ipc-path-too-long", path_just_short_enough, "starting"),
    ("jit-lock", lock_held_by_a_mate_that_compiles, "starting"),
    ("slow-compile", somebody_compiles, "starting"),
    ("cuda-fork-poisoned", another_error_of_cuda, "starting"),
    ("ray-placement", young_placement, "starting"),
    ("handshake-timeout-slow-storage", imports_from_a_disk, "starting"),
]

"""Faults of the GPU layer and their look-alikes: cause by cause, for the table of test_causes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllmdiag.model.gpu import (
    Accelerator,
    Bridge,
    FlightEntry,
    FlightGroup,
    FlightRecord,
    KernelImage,
    RasCommunicator,
    RasRank,
    RasReport,
    Reading,
    Trouble,
)
from vllmdiag.model.process import Limits
from vllmdiag.model.snapshot import KernelLine, LogLine

from .scenario import (
    _WORKER_LOOP,
    API,
    ENGINE,
    ENGINE_RUNS_MODEL,
    ENGINE_WAITS,
    WORKER0,
    WORKER_ALL_REDUCE,
    WORKER_IDLE,
    Server,
    Stack,
)
from .startup_cases import IN_NCCL, stands

Scenario = Callable[[Server], None]
W0, W1 = WORKER0, WORKER0 + 1
RUNNING = {"num_requests_running": 1.0, "generation_tokens_total": 5.0, "prompt_tokens_total": 7.0}
_SYNC: Stack = (("synchronize", "torch/cuda/__init__.py"),)
_STEP: Stack = (
    ("GPUModelRunner.execute_model", "vllm/v1/worker/gpu_model_runner.py"),
    ("Worker.execute_model", "vllm/v1/worker/gpu_worker.py"),
    *_WORKER_LOOP,
)
_WARM: Stack = (
    ("GPUModelRunner._dummy_run", "vllm/v1/worker/gpu_model_runner.py"),
    ("Worker.compile_or_warm_up_model", "vllm/v1/worker/gpu_worker.py"),
    *_WORKER_LOOP,
)
_CAPTURE: Stack = (("GPUModelRunner.capture_model", "vllm/v1/worker/gpu_model_runner.py"), *_WARM[1:])
_ALL_REDUCE: Stack = (("PyNcclCommunicator.all_reduce", "vllm/distributed/device_communicators/pynccl.py"),)
_CUSTOM: Stack = (
    ("CustomAllreduce.all_reduce", "vllm/distributed/device_communicators/custom_all_reduce.py"),
    ("CustomAllreduce.custom_all_reduce", "vllm/distributed/device_communicators/custom_all_reduce.py"),
    ("CudaCommunicator.all_reduce", "vllm/distributed/device_communicators/cuda_communicator.py"),
)
_FIRST: Stack = (
    *_SYNC,
    ("PyNcclCommunicator.__init__", "vllm/distributed/device_communicators/pynccl.py"),
    *IN_NCCL[2:],
)
_WAITS_FOR_GPU: Stack = (
    ("Event.synchronize", "torch/cuda/streams.py"),
    ("GPUModelRunner._to_list", "vllm/v1/worker/gpu_model_runner.py"),
    ("GPUModelRunner.sample_tokens", "vllm/v1/worker/gpu_model_runner.py"),
    *_WORKER_LOOP,
)
_DISPATCH: Stack = (
    *_SYNC,
    ("Buffer.low_latency_dispatch", "deep_ep/buffer.py"),
    ("DeepEPLL.prepare", "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll_prepare_finalize.py"),
    *_STEP,
)
_CONNECTOR: Stack = (
    ("NixlConnectorWorker.start_load_kv", "vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py"),
    *_STEP,
)
_WORKSPACE: Stack = (
    ("MnnvlMemory.open_mnnvl_memory", "flashinfer/comm/mnnvl.py"),
    ("create_allreduce_fusion_workspace", "flashinfer/comm/allreduce.py"),
    *_STEP,
)
_SENDS: Stack = (("GroupCoordinator.send_tensor_dict", "vllm/distributed/parallel_state.py"), *_STEP)
_RECEIVES: Stack = (("GroupCoordinator.recv_tensor_dict", "vllm/distributed/parallel_state.py"), *_STEP)
_LAYER: Stack = (("Fp8.apply", "vllm/model_executor/layers/quantization/fp8.py"),)
SPINS = {"busy_pct": 100, "memory_busy_pct": 0, "power_w": 128.0, "power_limit_w": 700.0}
WORKS = {"busy_pct": 100, "memory_busy_pct": 61, "power_w": 512.0, "power_limit_w": 700.0}


def gpus(server: Server, load: dict[str, float], count: int = 2, **more: object) -> None:
    """The server's ranks have a GPU each, with this load in both readings."""
    readings = tuple(msgspec.convert({"t": t, **load}, Reading) for t in (0.1, 3.0))
    made = tuple(
        msgspec.structs.replace(
            Accelerator(vendor="nvidia", index=i, minor=i, pci=f"0000:{61 + i}:00.0", readings=readings), **more
        )
        for i in range(count)
    )
    server.fields = {**server.fields, "accelerators": made}
    for i, pid in enumerate(server.workers or [ENGINE]):
        server.processes.setdefault(pid, {})["device_files"] = ("/dev/nvidiactl", f"/dev/nvidia{i}")


def frozen(server: Server, worker0: Stack, worker1: Stack) -> None:
    """A request runs, nothing moves, and the ranks are in the given stacks."""
    server.stacks = {ENGINE: ENGINE_WAITS, W0: worker0, W1: worker1}
    server.metrics = (RUNNING, RUNNING)


def log(server: Server, text: str) -> None:
    """One known line of the log."""
    server.fields = {**server.fields, "log_lines": (LogLine(file="vllm.log", number=1, text=text),)}


def starts(server: Server, worker0: Stack, worker1: Stack) -> None:
    """A start-up that stands, the GPUs spinning."""
    stands(server, worker0, worker1)
    gpus(server, SPINS)


# -- collective-divergence --------------------------------------------------------------------------------------------


def counts(server: Server, first: int, second: int, moved: int = 0) -> None:
    """NCCL's counts of two ranks in two looks."""

    def report(t: float, more: int) -> RasReport:
        ranks = tuple(
            RasRank(rank=i, pid=WORKER0 + i, counts={"AllReduce": n + more}) for i, n in enumerate((first, second))
        )
        return RasReport(t=t, communicators=(RasCommunicator(hash="a1", size=2, ranks=ranks),))

    server.fields = {**server.fields, "ras": (report(0.0, 0), report(3.0, moved))}


def one_count_behind(server: Server) -> None:
    frozen(server, (("run", "triton/runtime/jit.py"), *_STEP), _WAITS_FOR_GPU)
    counts(server, 811, 812)


def dumps_disagree(server: Server) -> None:
    frozen(server, _WAITS_FOR_GPU, _WAITS_FOR_GPU)

    def dump(rank: int, last: int) -> FlightRecord:
        entries = tuple(FlightEntry(seq=n, op="all_gather", sizes=((4,),)) for n in (8, last))
        group = FlightGroup(name="3", description="tp", ranks=(0, 1), enqueued=last, entries=entries)
        return FlightRecord(rank=rank, age_s=41.0, groups=(group,))

    server.fields = {"flight_records": (dump(0, 9), dump(1, 8))}


def one_layer_apart(server: Server) -> None:
    """No frame is a known wait: the host has launched ahead, and every GPU spins."""
    attention, experts = (("Attention.forward", "m.py"), *_STEP), (("Experts.forward", "m.py"), *_STEP)
    server.tp = 4
    server.stacks = {ENGINE: ENGINE_WAITS}
    server.stacks |= {pid: (*_LAYER, *(attention if pid == W0 else experts)) for pid in server.workers}
    server.metrics = (RUNNING, RUNNING)
    gpus(server, SPINS, 4)


def one_layer_apart_at_work(server: Server) -> None:
    one_layer_apart(server)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def behind_and_moving(server: Server) -> None:
    one_count_behind(server)
    counts(server, 811, 812, moved=40)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


# -- the others -------------------------------------------------------------------------------------------------------


def kernel_without_end(server: Server) -> None:
    server.uniproc, server.tp = True, 1
    server.stacks = {ENGINE: ENGINE_RUNS_MODEL}
    server.metrics = (RUNNING, RUNNING)
    gpus(server, SPINS, 1)


def kernel_that_a_peer_waits_for(server: Server) -> None:
    frozen(server, WORKER_ALL_REDUCE, _WAITS_FOR_GPU)


def kernel_that_works(server: Server) -> None:
    kernel_without_end(server)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def captures(server: Server) -> None:
    starts(server, (*_SYNC, *_ALL_REDUCE, *_CAPTURE), (*_SYNC, *_ALL_REDUCE, *_CAPTURE))


def captures_size_after_size(server: Server) -> None:
    starts(server, _CAPTURE, _CAPTURE)
    sizes = [_CAPTURE, (*_SYNC, *_CAPTURE), (("Linear.forward", "m.py"), *_CAPTURE)]
    server.stacks |= {W0: sizes, W1: sizes}
    gpus(server, WORKS)
    server.cpu = {W0: 1.0, W1: 1.0}


def replays(server: Server) -> None:
    replay: Stack = (("CUDAGraph.replay", "torch/cuda/graphs.py"), *_STEP)
    frozen(server, replay, replay)
    gpus(server, SPINS)


def bad_path(server: Server) -> None:
    starts(server, _FIRST, _FIRST)
    gpus(server, SPINS, iommu="DMA-FQ", bridges=(Bridge(pci="0000:40:03.1", redirects=True),))


def bad_path_under_its_own_all_reduce(server: Server) -> None:
    starts(server, (*_SYNC, *_CUSTOM, *_WARM), (*_SYNC, *_CUSTOM, *_WARM))
    server.processes[API] = {"environ": {"NCCL_P2P_DISABLE": "1"}}


def bad_path_that_serves(server: Server) -> None:
    gpus(server, WORKS, iommu="DMA-FQ", bridges=(Bridge(pci="0000:40:03.1", redirects=True),))


def own_all_reduce(server: Server) -> None:
    starts(server, (*_SYNC, *_CUSTOM, *_WARM), (*_SYNC, *_CUSTOM, *_WARM))


def own_all_reduce_at_work(server: Server) -> None:
    frozen(server, (*_CUSTOM, *_STEP), (*_CUSTOM, *_STEP))
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def no_fabric(server: Server) -> None:
    starts(server, _WARM, _WARM)
    words = "registration with the NVSwitch fabric not started"
    gpus(server, {"busy_pct": 0}, troubles=(Trouble(code="fabric", text=words, critical=True),))
    log(server, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")


def fabric_late_beside_a_server(server: Server) -> None:
    """The words of an earlier start stand in the log of a server that is well."""
    log(server, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")


def xid(server: Server, text: str, t: float = 50.0) -> None:
    """A line of the kernel log."""
    server.fields = {**server.fields, "kernel_lines": (KernelLine(t=t, text=text),)}


def fell_off_the_bus(server: Server) -> None:
    frozen(server, WORKER_ALL_REDUCE, _WAITS_FOR_GPU)
    gpus(server, SPINS)
    xid(server, "NVRM: Xid (PCI:0000:62:00): 79, pid=4711, name=python, GPU has fallen off the bus.")


def memory_fault_named_by_pid(server: Server) -> None:
    frozen(server, WORKER_ALL_REDUCE, WORKER_ALL_REDUCE)
    xid(server, f"NVRM: Xid (PCI:0000:9c:00): 48, pid={W1}, name=VLLM::Worker_TP, DBE (double bit error)")


def xid_before_the_server(server: Server) -> None:
    gpus(server, {"busy_pct": 0})
    xid(server, "NVRM: Xid (PCI:0000:62:00): 79, pid=1, name=python, GPU has fallen off the bus.", t=1.0)


def xid_of_another_gpu(server: Server) -> None:
    gpus(server, {"busy_pct": 0})
    xid(server, "NVRM: Xid (PCI:0000:77:00): 79, pid=1, name=python, GPU has fallen off the bus.")


def xid_of_another_program(server: Server) -> None:
    gpus(server, {"busy_pct": 0})
    xid(server, "NVRM: Xid (PCI:0000:62:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault")


def may_not_lock(server: Server) -> None:
    stands(server, IN_NCCL, IN_NCCL)
    server.processes[W1] = {"limits": Limits(nofile=1024, memlock=8 << 20)}
    log(
        server,
        f"n1:{W1}:771 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    )


def little_memlock_without_rdma(server: Server) -> None:
    server.processes[W1] = {"limits": Limits(nofile=1024, memlock=8 << 20)}


def dispatches(server: Server) -> None:
    frozen(server, _DISPATCH, _DISPATCH)


def dispatches_at_work(server: Server) -> None:
    dispatches(server)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def stages(server: Server) -> None:
    """Two stages of a pipeline."""
    server.processes |= {pid: {"cmdline": (f"VLLM::Worker_PP{pid - W0}",)} for pid in (W0, W1)}


def stages_wait_for_each_other(server: Server) -> None:
    frozen(server, _RECEIVES, _SENDS)
    stages(server)


def prompts_only(server: Server) -> None:
    stages_wait_for_each_other(server)
    server.metrics = (RUNNING, {**RUNNING, "prompt_tokens_total": 4711.0})


def stages_at_work(server: Server) -> None:
    stages_wait_for_each_other(server)
    server.metrics = (RUNNING, {**RUNNING, "prompt_tokens_total": 4711.0, "generation_tokens_total": 9.0})


def connector_blocks(server: Server) -> None:
    frozen(server, WORKER_ALL_REDUCE, _CONNECTOR)


def connector_returns(server: Server) -> None:
    connector_blocks(server)
    server.stacks[W1] = [_CONNECTOR, WORKER_ALL_REDUCE, _CONNECTOR]
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def no_kernel(server: Server) -> None:
    frozen(server, _WAITS_FOR_GPU, _WAITS_FOR_GPU)
    gpus(server, SPINS, capability="12.1")
    image = KernelImage(path="/v/vllm/_C.abi3.so", archs=("sm_80", "sm_90a", "sm_100a"))
    for pid in (W0, W1):
        server.processes[pid]["kernels"] = (image,)


def kernels_of_the_family(server: Server) -> None:
    no_kernel(server)
    server.stacks, server.metrics = {}, None


def sets_up_a_workspace(server: Server) -> None:
    frozen(server, _WORKSPACE, _WORKSPACE)


def workspace_in_passing(server: Server) -> None:
    sets_up_a_workspace(server)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def others_elsewhere(server: Server) -> None:
    frozen(server, WORKER_ALL_REDUCE, WORKER_ALL_REDUCE)
    server.args = (
        "--pipeline-parallel-size",
        "2",
        "--nnodes",
        "2",
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "29501",
    )


def others_elsewhere_at_work(server: Server) -> None:
    others_elsewhere(server)
    server.metrics = (RUNNING, {**RUNNING, "generation_tokens_total": 9.0})


def idle_with_gpus(server: Server) -> None:
    server.stacks = {W0: WORKER_IDLE, W1: WORKER_IDLE}
    gpus(server, {"busy_pct": 0, "memory_busy_pct": 0})


FAULTS: list[tuple[str, Scenario, str, str | None]] = [
    ("collective-divergence", one_count_behind, "Worker_TP0", "critical"),
    ("collective-divergence", dumps_disagree, "Worker_TP1", "critical"),
    ("collective-divergence", one_layer_apart, "Worker_TP0", "critical"),
    ("kernel-wedged", kernel_without_end, "EngineCore", "critical"),
    ("kernel-wedged", kernel_that_a_peer_waits_for, "Worker_TP1", "critical"),
    ("cudagraph-capture-stuck", captures, "Worker_TP0", "critical"),
    ("cudagraph-capture-stuck", replays, "Worker_TP0", "critical"),
    ("p2p-broken", bad_path, "Worker_TP0", "critical"),
    ("p2p-broken", bad_path_under_its_own_all_reduce, "Worker_TP0", "critical"),
    ("custom-allreduce-spin", own_all_reduce, "Worker_TP0", "critical"),
    ("fabric-manager", no_fabric, "Worker_TP0", "critical"),
    ("gpu-xid", fell_off_the_bus, "Worker_TP1", "critical"),
    ("gpu-xid", memory_fault_named_by_pid, "Worker_TP1", "critical"),
    ("memlock-limit", may_not_lock, "Worker_TP1", "critical"),
    ("all2all-stuck", dispatches, "Worker_TP0", "critical"),
    ("pp-p2p-deadlock", stages_wait_for_each_other, "Worker_PP0", "critical"),
    ("pp-p2p-deadlock", prompts_only, "Worker_PP0", "critical"),
    ("kv-connector-blocked", connector_blocks, "Worker_TP1", "critical"),
    ("wrong-arch-build", no_kernel, "Worker_TP0", "critical"),
    ("slow-fallback", sets_up_a_workspace, "Worker_TP0", "warning"),
    ("remote-rank-stalled", others_elsewhere, "Worker_TP0", "critical"),
]
LOOK_ALIKES: list[tuple[str, Scenario, str]] = [
    ("collective-divergence", one_layer_apart_at_work, "serving"),
    ("collective-divergence", behind_and_moving, "serving"),
    ("kernel-wedged", kernel_that_works, "serving"),
    ("kernel-wedged", idle_with_gpus, "idle"),
    ("cudagraph-capture-stuck", captures_size_after_size, "starting"),
    ("p2p-broken", bad_path_that_serves, "idle"),
    ("custom-allreduce-spin", own_all_reduce_at_work, "serving"),
    ("fabric-manager", fabric_late_beside_a_server, "idle"),
    ("gpu-xid", xid_before_the_server, "idle"),
    ("gpu-xid", xid_of_another_gpu, "idle"),
    ("gpu-xid", xid_of_another_program, "idle"),
    ("memlock-limit", little_memlock_without_rdma, "idle"),
    ("all2all-stuck", dispatches_at_work, "serving"),
    ("pp-p2p-deadlock", stages_at_work, "serving"),
    ("kv-connector-blocked", connector_returns, "serving"),
    ("wrong-arch-build", kernels_of_the_family, "idle"),
    ("slow-fallback", workspace_in_passing, "serving"),
    ("remote-rank-stalled", others_elsewhere_at_work, "serving"),
]

"""Layer 4 beyond the table of causes: who is named, who is not blamed, and what one does not know enough to say."""

from __future__ import annotations

import msgspec

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis, Verdict
from vllmdiag.model.gpu import Driver, KernelImage, NvLink, RasCommunicator, RasRank, RasReport
from vllmdiag.model.snapshot import KernelLine, LogLine, Snapshot
from vllmdiag.vllm.gpu import known_hang, runs_on, version_in_path

from . import gpu_cases as g
from .scenario import (
    API,
    ENGINE,
    ENGINE_RUNS_MODEL,
    ENGINE_WAITS,
    WORKER0,
    WORKER_ALL_REDUCE,
    WORKER_IDLE,
    WORKER_METHOD,
    Server,
)
from .startup_cases import COMPILES

W0, W1 = WORKER0, WORKER0 + 1
BLIND = Missing(what="stacks", why="EPERM", next="run as root")


def judged(change: g.Scenario, **fields: object) -> Diagnosis:
    server = Server(**fields)  # type: ignore[arg-type]
    change(server)
    return diagnose(server.snapshot())


def verdict(change: g.Scenario, **fields: object) -> Verdict:
    return judged(change, **fields).verdict


def test_the_rank_that_has_passed_the_collective_is_named_and_not_blamed() -> None:
    found = verdict(g.one_layer_apart)
    assert found.confidence == "high"
    assert "that is no blame" in found.summary or "nobody is blamed" in found.summary
    assert any("4 GPUs: busy 100 %, memory traffic 0 %" in words for words in found.evidence)


def test_a_rank_that_is_late_because_it_compiles_is_named_for_that_and_not_for_its_count() -> None:
    def change(server: Server) -> None:
        g.one_count_behind(server)
        server.stacks[W0] = COMPILES

    assert verdict(change).cause == "worker-busy"


def test_a_rank_that_is_late_because_it_runs_a_method_of_the_user_is_named_for_that() -> None:
    def change(server: Server) -> None:
        g.one_count_behind(server)
        server.stacks[W0] = WORKER_METHOD

    assert (verdict(change).cause, verdict(change).subject.label) == ("worker-busy", "Worker_TP0")


def test_a_rank_that_launched_what_nobody_else_did_is_the_lead() -> None:
    def change(server: Server) -> None:
        server.tp = 4
        server.stacks = {ENGINE: ENGINE_WAITS, **dict.fromkeys((W0, W1, W0 + 2, W0 + 3), g._WAITS_FOR_GPU)}
        server.metrics = (g.RUNNING, g.RUNNING)
        ranks = tuple(RasRank(rank=i, pid=W0 + i, counts={"AllReduce": 7 + (i == 2)}) for i in range(4))
        report = RasReport(communicators=(RasCommunicator(hash="a1", size=4, ranks=ranks),))
        server.fields = {"ras": (report, msgspec.structs.replace(report, t=3.0))}

    found = verdict(change)
    assert (found.cause, found.subject.label, found.confidence) == ("collective-divergence", "Worker_TP2", "high")
    assert "nobody else launched" in found.summary


def test_a_rank_of_another_node_that_nccl_names_is_told_with_its_host() -> None:
    def change(server: Server) -> None:
        g.frozen(server, WORKER_ALL_REDUCE, WORKER_ALL_REDUCE)
        here = tuple(RasRank(rank=i, pid=W0 + i, host="10.0.0.1", counts={"AllReduce": 8}) for i in (0, 1))
        there = RasRank(rank=2, pid=77, host="10.0.0.2", counts={"AllReduce": 7})
        report = RasReport(communicators=(RasCommunicator(hash="a1", size=3, ranks=(*here, there)),))
        server.fields = {"ras": (report, msgspec.structs.replace(report, t=3.0))}

    found = verdict(change)
    assert (found.cause, found.subject.node) == ("remote-rank-stalled", "10.0.0.2")


def test_with_one_rank_unseen_no_place_of_the_others_is_a_cause() -> None:
    def change(server: Server) -> None:
        g.dispatches(server)
        server.stacks[W1] = BLIND

    assert verdict(change).cause not in ("all2all-stuck", "custom-allreduce-spin", "cudagraph-capture-stuck")


def test_a_gpu_that_has_nothing_to_do_runs_no_kernel_without_end() -> None:
    def change(server: Server) -> None:
        g.kernel_without_end(server)
        g.gpus(server, {"busy_pct": 0, "memory_busy_pct": 0, "power_w": 50.0, "power_limit_w": 700.0}, 1)

    found = verdict(change)
    assert (found.cause, found.layer) == ("unknown", 4)


def test_a_release_that_is_known_to_hang_is_evidence_with_its_cure() -> None:
    def change(server: Server) -> None:
        g.kernel_without_end(server)
        library = "/c/flashinfer/0.6.12/100a/cached_ops/gdn_prefill_sm100/gdn_prefill_sm100.so"
        server.processes[ENGINE]["libraries"] = (library,)

    assert any("flashinfer 0.6.12" in words and "triton" in words for words in verdict(change).evidence)


def test_gpus_that_are_joined_by_nvlink_do_not_go_through_the_bridges() -> None:
    def change(server: Server) -> None:
        g.bad_path(server)
        one = server.fields["accelerators"][0]  # type: ignore[index]
        readings = tuple(msgspec.structs.replace(r, links=(NvLink(number=0, up=True),)) for r in one.readings)
        found = tuple(msgspec.structs.replace(d, readings=readings) for d in server.fields["accelerators"])  # type: ignore[attr-defined]
        server.fields = {**server.fields, "accelerators": found}

    assert verdict(change).cause != "p2p-broken"


def test_an_iommu_that_passes_addresses_through_does_no_harm() -> None:
    def change(server: Server) -> None:
        g.bad_path(server)
        found = tuple(msgspec.structs.replace(d, iommu="identity") for d in server.fields["accelerators"])  # type: ignore[attr-defined]
        server.fields = {**server.fields, "accelerators": found}

    assert verdict(change).cause != "p2p-broken"


def test_a_first_collective_without_an_end_and_nothing_known_of_the_path_is_not_decided() -> None:
    def change(server: Server) -> None:
        g.starts(server, g._FIRST, g._FIRST)

    found = verdict(change)
    assert (found.cause, found.layer) == ("unknown", 4)
    assert any("what would decide it" in words for words in found.evidence)


def test_a_driver_that_does_not_answer_is_a_fault_of_the_gpu_while_nothing_moves_and_a_warning_else() -> None:
    hung = Driver(vendor="nvidia", problem="hangs", text="NVML hangs in the call power")

    def stalled(server: Server) -> None:
        g.frozen(server, WORKER_ALL_REDUCE, WORKER_ALL_REDUCE)
        server.fields = {"drivers": (hung,)}

    assert verdict(stalled).cause == "gpu-xid"


def test_a_hard_fault_of_a_gpu_that_still_serves_is_a_warning() -> None:
    def change(server: Server) -> None:
        g.gpus(server, g.WORKS)
        g.xid(server, "NVRM: Xid (PCI:0000:62:00): 94, Contained memory error")
        server.metrics = (g.RUNNING, {**g.RUNNING, "generation_tokens_total": 9.0})

    found = verdict(change)
    assert (found.status, found.cause, found.subject.label) == ("warning", "gpu-xid", "Worker_TP1")


def test_a_fault_that_the_program_itself_has_brought_on_is_said_to_be_that() -> None:
    def change(server: Server) -> None:
        g.frozen(server, WORKER_ALL_REDUCE, WORKER_ALL_REDUCE)
        g.xid(server, f"NVRM: Xid (PCI:0000:62:00): 31, pid={W1}, name=VLLM::Worker_TP, Ch 0008, MMU Fault")

    found = verdict(change)
    assert (found.cause, found.confidence) == ("gpu-xid", "medium")
    assert "not by the hardware" in found.summary


def test_workers_in_sight_of_a_live_look_without_their_engine_are_not_called_stuck_for_equal_stacks() -> None:
    """A headless node at work is seen in the same collective again and again."""

    def change(server: Server) -> None:
        server.gone = {ENGINE}
        server.stacks = {W0: WORKER_ALL_REDUCE, W1: WORKER_ALL_REDUCE}
        server.args = ("--headless", "--nnodes", "2", "--node-rank", "1")
        server.processes = {pid: {"ppid": API} for pid in (W0, W1)}

    assert [f.cause for f in judged(change).findings if f.layer == 4 and f.severity != "info"] == []


def test_an_idle_server_with_gpus_and_equal_counts_is_idle() -> None:
    def change(server: Server) -> None:
        g.idle_with_gpus(server)
        g.counts(server, 812, 812)

    assert verdict(change).cause == "idle"


def test_an_idle_server_that_rests_in_uneven_counts_is_idle() -> None:
    def change(server: Server) -> None:
        g.idle_with_gpus(server)
        g.counts(server, 811, 812)
        server.stacks = {W0: WORKER_IDLE, W1: WORKER_IDLE}

    assert verdict(change).cause == "idle"


def test_kernels_run_on_newer_gpus_of_their_family_and_ptx_on_all_newer_ones() -> None:
    assert runs_on(["sm_80"], "8.6") is True
    assert runs_on(["sm_90a"], "9.0") is True
    assert runs_on(["sm_90a"], "10.0") is False
    assert runs_on(["sm_90"], "10.0") is False
    assert runs_on(["compute_90"], "12.1") is True
    assert runs_on(["sm_120"], "8.9") is False
    assert runs_on([], "9.0") is None
    assert runs_on(["sm_90"], "") is None


def test_a_build_for_an_older_gpu_of_the_same_family_is_no_sure_cause() -> None:
    def change(server: Server) -> None:
        g.no_kernel(server)
        image = KernelImage(path="/v/vllm/_C.abi3.so", archs=("sm_80", "sm_120"))
        for pid in (W0, W1):
            server.processes[pid]["kernels"] = (image,)

    assert {f.confidence for f in judged(change).findings if f.cause == "wrong-arch-build"} == {"medium"}


def test_versions_of_kernel_libraries_are_found_in_their_paths() -> None:
    assert version_in_path("flashinfer", "/c/flashinfer/0.6.8.post1/90/x.so") == "0.6.8.post1"
    assert version_in_path("flashinfer", "/v/site-packages/flashinfer/x.so") == ""
    assert version_in_path("other", "/c/flashinfer/0.6.8/x.so") == ""
    assert known_hang("flashinfer", "0.6.13", ["gdn_prefill"]) is None
    assert known_hang("flashinfer", "", ["gdn_prefill"]) is None


def test_an_engine_that_waits_for_its_gpu_with_unknown_load_is_not_decided() -> None:
    def change(server: Server) -> None:
        server.uniproc, server.tp = True, 1
        server.stacks = {ENGINE: ENGINE_RUNS_MODEL}
        server.metrics = (g.RUNNING, g.RUNNING)

    found = verdict(change)
    assert (found.cause, found.layer) == ("unknown", 4)


def test_the_layer_says_what_was_seen_of_it_and_is_not_well_where_the_driver_did_not_answer() -> None:
    def well(server: Server) -> None:
        g.idle_with_gpus(server)
        g.counts(server, 812, 812)

    def blind(server: Server) -> None:
        server.fields = {
            "drivers": (Driver(vendor="nvidia", problem="version-mismatch", text="the driver was updated"),)
        }

    layers = [judged(change).layers[3] for change in (well, blind)]
    assert [layer.status for layer in layers] == ["ok", "unknown"]
    assert "2 GPUs read, NCCL's counts agree" in layers[0].summary
    assert "the driver was updated" in layers[1].summary


# -- without a process in sight ---------------------------------------------------------------------------------------

XID = KernelLine(t=50.0, text="NVRM: Xid (PCI:0000:9c:00): 119, pid=77, name=python, Timeout waiting for RPC response")
LAG = RasReport(
    communicators=(
        RasCommunicator(
            hash="a1",
            size=2,
            ranks=tuple(RasRank(rank=i, pid=40 + i, host="n1", counts={"AllReduce": 7 + i}) for i in (0, 1)),
        ),
    )
)


def test_a_kernel_log_alone_names_the_device_and_the_process_where_a_log_knows_it() -> None:
    alone = diagnose(Snapshot(pasted=True, kernel_lines=(XID,))).verdict
    assert (alone.cause, alone.confidence) == ("gpu-xid", "medium")
    line = LogLine(file="vllm.log", number=1, text="(Worker_TP2 pid=77) INFO 01-01 00:00:00 [core.py:1] hello")
    known = diagnose(Snapshot(pasted=True, kernel_lines=(XID,), log_lines=(line,))).verdict
    assert (known.subject.label, known.subject.pid, known.confidence) == ("Worker_TP2", 77, "high")


def test_a_report_of_nccl_alone_names_the_rank_with_its_host() -> None:
    verdict_ = diagnose(Snapshot(pasted=True, ras=(LAG, msgspec.structs.replace(LAG, t=3.0)))).verdict
    assert (verdict_.cause, verdict_.subject.label, verdict_.subject.node) == ("collective-divergence", "rank 0", "n1")


def test_a_machine_that_is_looked_at_without_any_vllm_is_not_judged_by_its_kernel_log() -> None:
    assert diagnose(Snapshot(kernel_lines=(XID,))).verdict.cause == "unknown"


def test_xids_of_programs_and_of_recovered_gpus_say_nothing_by_themselves() -> None:
    lines = (
        KernelLine(t=1.0, text="NVRM: Xid (PCI:0000:9c:00): 31, pid=77, name=python, MMU Fault"),
        KernelLine(t=2.0, text="NVRM: Xid (PCI:0000:9c:00): 154, GPU recovery action changed from 0x1 to 0x0 (None)"),
    )
    assert diagnose(Snapshot(pasted=True, kernel_lines=lines)).verdict.cause == "unknown"

"""GPU evidence as people paste it: each form gives the facts that the live sources would have recorded."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest

from tests.unit.gpu.test_collectives import SAMPLES
from vllmdiag.bundle.draft import Draft
from vllmdiag.bundle.importers import formats
from vllmdiag.bundle.importers.format import Context
from vllmdiag.bundle.triage import triage
from vllmdiag.model.snapshot import Snapshot


def pasted(tmp_path: Path, *texts: str, **named: str) -> Snapshot:
    """The snapshot that these files make; look 1 for the second of the same kind."""
    for i, text in enumerate(texts):
        (tmp_path / f"piece{i}.txt").write_text(text)
    for name, text in named.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return triage([str(tmp_path)], io.BytesIO()).snapshot()


TABLE = """\
Tue Sep  1 10:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
| N/A   41C    P0            131W /  700W |   71234MiB /  81559MiB |    100%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:3B:00.0 Off |                    0 |
|ERR!  ERR!  ERR!            ERR! / ERR!  |   71234MiB /  81559MiB |    ERR!      Default |
+-----------------------------------------+------------------------+----------------------+
"""


def test_the_table_of_nvidia_smi(tmp_path: Path) -> None:
    seen = pasted(tmp_path, TABLE)
    first, second = seen.accelerators
    assert (first.index, first.name, first.pci) == (0, "NVIDIA H100 80GB HBM3", "0000:19:00.0")
    (reading,) = first.readings
    assert (reading.busy_pct, reading.power_w, reading.power_limit_w, reading.temperature_c) == (100, 131, 700, 41)
    assert (reading.memory_used, reading.memory_total) == (71234 << 20, 81559 << 20)
    assert [t.code for t in second.troubles] == ["lost"]
    assert [(d.version, d.runtime) for d in seen.drivers] == [("580.95.05", "13.0")]


COMMENT = "# index, utilization.gpu, utilization.memory, power.draw, power.limit\n"
COMMAND = (
    "$ nvidia-smi --query-gpu=index,utilization.gpu,utilization.memory,power.draw,power.limit "
    "--format=csv,noheader,nounits\n"
)
CSV = "index, utilization.gpu [%], utilization.memory [%], power.draw [W], power.limit [W]\n"


@pytest.mark.parametrize(
    "text",
    [
        CSV + "0, 97 %, 0 %, 88.10 W, 350.00 W\n1, 96 %, 1 %, 90.00 W, 350.00 W\n",
        COMMENT + "0, 97 %, 0 %, 88.10 W, 350.00 W\n1, 96 %, 1 %, 90.00 W, 350.00 W\n",
        COMMAND + "0, 97, 0, 88.10, 350.00\n1, 96, 1, 90.00, 350.00\n",
    ],
    ids=["with a title", "with a comment for a title", "without a title"],
)
def test_answers_to_a_query(tmp_path: Path, text: str) -> None:
    devices = pasted(tmp_path, text.replace("\n", "\r\n")).accelerators
    found = [(d.index, d.readings[0].busy_pct, d.readings[0].memory_busy_pct, d.readings[0].power_w) for d in devices]
    assert found == [(0, 97, 0, 88.1), (1, 96, 1, 90.0)]
    assert {d.readings[0].power_limit_w for d in devices} == {350.0}


QUERIED = "# nvidia-smi --query-gpu=index,memory.used --format=csv,noheader\n0, 9 MiB\n1, 9 MiB\n"
BY_ADDRESS = """\
# nvidia-smi --query-compute-apps=pid,gpu_bus_id,used_memory --format=csv,noheader
22071, 00000000:41:00.0, 13014 MiB
22072, 00000000:81:00.0, [N/A]
"""
LISTED = """\
|    0   N/A  N/A           22071      C   VLLM::Worker_TP0                      13014MiB |
|    1   N/A  N/A           22072      C   VLLM::Worker_TP1                           N/A |
"""


@pytest.mark.parametrize("texts", [(QUERIED, BY_ADDRESS), (BY_ADDRESS, QUERIED), (BY_ADDRESS,), (TABLE + LISTED,)])
def test_who_holds_memory_of_which_device(tmp_path: Path, texts: tuple[str, ...]) -> None:
    devices = pasted(tmp_path, *texts).accelerators
    users = [[(p.pid, p.memory) for p in d.processes or ()] for d in devices]
    assert users == [[(22071, 13014 << 20)], [(22072, None)]]


def test_a_user_without_an_address_is_of_the_only_device(tmp_path: Path) -> None:
    apps = "pid, process_name, used_gpu_memory [MiB]\n30771, VLLM::EngineCore, 104277 MiB\n"
    one = pasted(tmp_path, QUERIED.replace("1, 9 MiB\n", ""), apps).accelerators
    assert [[p.pid for p in d.processes or ()] for d in one] == [[30771]]
    two = pasted(tmp_path, QUERIED, apps).accelerators
    assert [d.processes for d in two] == [None, None]


def test_devices_of_several_hosts_keep_their_host(tmp_path: Path) -> None:
    text = "host, index, utilization.gpu, utilization.memory\na1, 0, 99 %, 0 %\na2, 0, 98 %, 0 %\n"
    assert [(d.node, d.index) for d in pasted(tmp_path, text).accelerators] == [("a1", 0), ("a2", 0)]


def test_the_same_device_again_is_a_second_look(tmp_path: Path) -> None:
    (device,) = pasted(tmp_path, CSV + "0, 100 %, 0 %, 80 W, 350 W\n0, 0 %, 0 %, 40 W, 350 W\n").accelerators
    assert [r.busy_pct for r in device.readings] == [100, 0]
    assert device.readings[0].t < device.readings[1].t


def test_health_in_columns_of_ones_own_belongs_to_the_device_of_the_table(tmp_path: Path) -> None:
    health = (
        "# gpu index, bus, remapped_rows(corr,uncorr,pending,failure), ecc_uncorrected_volatile, recovery_action\n"
        "0 0000:19:00 0,0,0,0 0 None\n1 0000:3b:00 0,3,1,1 7 DrainAndReset\n"
    )
    first, second = pasted(tmp_path, TABLE, health).accelerators
    assert first.troubles == ()
    assert {t.code for t in second.troubles} == {"lost", "rows-pending", "rows-failed", "ecc", "recovery"}
    assert (second.rows_remapped, second.ecc_uncorrected) == (3, 7)
    assert "drain and reset" in next(t.text for t in second.troubles if t.code == "recovery")


LONG = """\
==============NVSMI LOG==============

Timestamp                                 : Tue Sep  1 10:00:00 2026
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 2
GPU 00000000:9C:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Minor Number                          : 2
    GPU Recovery Action                   : Reset
    Fabric
        State                             : In Progress
        Status                            : N/A
    FB Memory Usage
        Total                             : 81920 MiB
        Used                              : 70000 MiB
    Utilization
        Gpu                               : 100 %
        Memory                            : 0 %
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 0
            DRAM Uncorrectable            : 2
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 12
        Pending                           : Yes
        Remapping Failure Occurred        : No
    GPU Power Readings
        Power Draw                        : 121.44 W
        Current Power Limit               : 400.00 W
GPU 00000000:BD:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Utilization
        Gpu                               : 3 %
"""


def test_the_long_listing(tmp_path: Path) -> None:
    first, second = pasted(tmp_path, LONG).accelerators
    assert (first.pci, first.minor, first.fabric, first.rows_remapped) == ("0000:9c:00.0", 2, "in progress", 12)
    assert {t.code for t in first.troubles} == {"recovery", "fabric", "ecc", "rows-pending"}
    reading = first.readings[0]
    assert (reading.busy_pct, reading.memory_busy_pct, reading.power_w, reading.power_limit_w) == (100, 0, 121.44, 400)
    assert (second.index, second.readings[0].busy_pct, second.troubles) == (1, 3, ())


def test_a_driver_that_fails_is_told(tmp_path: Path) -> None:
    seen = pasted(tmp_path, "Failed to initialize NVML: Driver/library version mismatch\n")
    assert [d.problem for d in seen.drivers] == ["version-mismatch"]


TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tSYS\tPIX\t0-31\t0
GPU1\tSYS\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


def test_topology_and_what_the_driver_says_of_p2p(tmp_path: Path) -> None:
    p2p = " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n"
    first, _ = pasted(tmp_path, TOPOLOGY, p2p).accelerators
    assert [(p.index, p.path, p.p2p) for p in first.peers] == [(1, "SYS", "chipset not supported")]


LSPCI = """\
00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab
\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
01:00.0 VGA compatible controller: NVIDIA Corporation Device 2684
40:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab
\tBus: primary=40, secondary=41, subordinate=42, sec-latency=0
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
41:00.0 VGA compatible controller: NVIDIA Corporation Device 2684
80:01.1 PCI bridge: a bridge to something else
\tBus: primary=80, secondary=81, subordinate=81, sec-latency=0
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
81:00.0 Non-Volatile memory controller: a disk
"""


def test_bridges_belong_to_the_devices_on_the_buses_they_lead_to(tmp_path: Path) -> None:
    first, second = pasted(tmp_path, LSPCI).accelerators
    assert [(b.pci, b.redirects) for b in first.bridges or ()] == [("0000:00:01.1", True)]
    assert [(b.pci, b.redirects) for b in second.bridges or ()] == [("0000:40:01.1", False)]


def test_bridges_whose_space_may_not_be_read_are_not_called_open(tmp_path: Path) -> None:
    text = "00:01.1 PCI bridge: x\n\tCapabilities: <access denied>\n01:00.0 3D controller: NVIDIA Corporation x\n"
    (device,) = pasted(tmp_path, text).accelerators
    assert [b.redirects for b in device.bridges or ()] in ([None], [])


def test_the_type_of_the_iommu_groups_belongs_to_the_devices_in_them(tmp_path: Path) -> None:
    text = (
        "/sys/kernel/iommu_groups/7/type identity\n/sys/kernel/iommu_groups/8/type DMA\n"
        "/sys/kernel/iommu_groups/7/devices/0000:01:00.0\n/sys/kernel/iommu_groups/8/devices/0000:41:00.0\n"
    )
    assert [d.iommu for d in pasted(tmp_path, LSPCI, text).accelerators] == ["identity", "DMA"]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (
            "● nvidia-fabricmanager.service - NVIDIA fabric manager\n     Active: failed (Result: exit-code)\n",
            "not running",
        ),
        ("nvidia-fabricmanager.service\n     Active: active (running) since Tue\n", "running"),
        ("Unit nvidia-fabricmanager.service could not be found.\n", "not running"),
    ],
)
def test_the_fabric_manager(tmp_path: Path, text: str, state: str) -> None:
    assert [d.fabric_manager for d in pasted(tmp_path, text).drivers] == [state]


IP_LINK = """\
link mlx5_3/1 state DOWN physical_state DISABLED netdev ib3
link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ib0
"""
IBSTAT = """\
CA 'mlx5_3'
\tCA type: MT4129
\tPort 1:
\t\tState: Down
CA 'mlx5_0'
\tCA type: MT4129
\tPort 1:
\t\tState: Active
"""


@pytest.mark.parametrize(
    "text",
    [
        "GPU1 mlx5_3 DOWN\nGPU0 mlx5_0 ACTIVE\n",
        IP_LINK,
        IBSTAT,
    ],
)
def test_rdma_ports(tmp_path: Path, text: str) -> None:
    ports = {(p.device, p.port): p.state for p in pasted(tmp_path, text).rdma}
    assert ports == {("mlx5_3", 1): "DOWN", ("mlx5_0", 1): "ACTIVE"}


@pytest.mark.parametrize(
    "line",
    [
        "[10231.55] NVRM: Xid (PCI:0000:9c:00): 79, pid=3301, name=python, GPU has fallen off the bus.",
        "[Tue Sep  1 10:00:00 2026] NVRM: Xid (PCI:0000:9c:00): 79, pid=3301, name=python, GPU has fallen off the bus.",
        "Sep  1 10:00:00 node1 kernel: NVRM: Xid (PCI:0000:9c:00): 79, pid=3301, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:9c:00): 79, pid=3301, GPU has fallen off the bus.",
    ],
)
def test_the_kernel_log_with_any_stamp(tmp_path: Path, line: str) -> None:
    (found,) = pasted(tmp_path, line + "\n[10232.00] usb 1-1: new device\n").kernel_lines
    assert found.text.startswith("NVRM: Xid (PCI:0000:9c:00): 79")


@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize("name", sorted(path.stem for path in SAMPLES.glob("*.json")))
def test_every_recorded_report_of_nccl_is_known_when_it_is_pasted(name: str, form: str, tmp_path: Path) -> None:
    (report,) = pasted(tmp_path, (SAMPLES / f"{name}.{form}").read_text()).ras
    assert report.format == ("json" if form == "json" else "text")
    assert report.communicators


def test_ranks_that_are_counted_first_and_named_after_are_not_counted_twice(tmp_path: Path) -> None:
    text = (
        "Job summary\n\nCommunicators... (0.00s)\n\nWarnings\n#0-0 (9e1c11aa22bb33cc) MISMATCH\n"
        "  Communicator ranks have different AllReduce operation counts\n"
        "  6 ranks have launched up to operation 812\n  2 ranks have launched up to operation 811\n"
        "  Rank 2 -- GPU 2 managed by process 42 on node 192.0.2.1\n"
        "  Rank 3 -- GPU 3 managed by process 43 on node 192.0.2.1\n"
    )
    (communicator,) = pasted(tmp_path, text).ras[0].communicators
    assert communicator.size == 8
    assert [(r.rank, r.counts) for r in communicator.ranks] == [(2, {"AllReduce": 811}), (3, {"AllReduce": 811})]
    assert [(t.count, t.ranks) for t in communicator.tallies] == [(812, 6)]


def test_the_analyser_of_torch_names_who_has_not_joined(tmp_path: Path) -> None:
    text = (
        "Not all ranks joining collective, sequence number: 4\ninternal record id: 3\ngroup info: 0:default_pg\n"
        "collective: nccl:all_reduce\nmissing ranks: {1}\ninput sizes: [[4]]\nworld size: 2\nexpected ranks: {0, 1}\n"
    )
    records = {r.rank: r.groups[0] for r in pasted(tmp_path, text).flight_records}
    assert [e.op for e in records[0].entries] == ["all_reduce"]
    assert (records[1].enqueued, records[1].entries) == (3, ())


def test_the_analyser_of_torch_names_who_has_entered_another_one(tmp_path: Path) -> None:
    text = (
        "Collective sequence number: 4 has errors\nCulprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected "
        "collective type: 'all_reduce' does not match found collective type: 'all_gather'\n"
    )
    ops = {r.rank: r.groups[0].entries[0].op for r in pasted(tmp_path, text).flight_records}
    assert ops[1] == "all_gather"
    assert ops[0] == "all_reduce"


def test_for_what_a_library_was_built(tmp_path: Path) -> None:
    text = (
        "$ cuobjdump --list-elf /venv/lib/python3.12/site-packages/vllm/_C.abi3.so\n"
        "ELF file    1: _C.1.sm_80.cubin\nELF file    2: _C.2.sm_90a.cubin\n"
    )
    stacks = (
        'Process 7: VLLM::EngineCore\n\nThread 7 (active): "MainThread"\n    run (multiprocessing/process.py:108)\n'
    )
    images = [image for p in pasted(tmp_path, stacks, text).processes for image in p.kernels]
    assert [image.archs for image in images] == [("sm_80", "sm_90a")]
    assert images[0].path.endswith("vllm/_C.abi3.so")


@pytest.mark.parametrize(
    "text",
    [
        "| NVIDIA-SMI 1\n" + "\x00|" * 4000,
        CSV + ", ,,,\n0, %, , W\n",
        "Job summary\n  1 2\nErrors\n#0-1 (",
        "GPU0 GPU1\n",
    ],
)
def test_damaged_pieces_do_no_harm(tmp_path: Path, text: str) -> None:
    stacks = (
        'Process 7: VLLM::EngineCore\n\nThread 7 (active): "MainThread"\n    run (multiprocessing/process.py:108)\n'
    )
    assert [p.pid for p in pasted(tmp_path, stacks, text).processes] == [7]


def test_a_document_that_is_no_report_of_nccl_is_not_taken_for_one(tmp_path: Path) -> None:
    stacks = (
        'Process 7: VLLM::EngineCore\n\nThread 7 (active): "MainThread"\n    run (multiprocessing/process.py:108)\n'
    )
    assert pasted(tmp_path, stacks, json.dumps({"nccl_version": 2, "communicators": 7}, indent=1)).ras == ()


def test_a_dump_of_the_flight_recorder_is_read_and_nothing_in_it_is_run() -> None:
    from vllmdiag.bundle.importers.nccl import read_dump

    draft, context = Draft(), Context(source="nccl_trace_rank_3", name="nccl_trace_rank_3")
    entry = {"collective_seq_id": 4, "profiling_name": "nccl:all_reduce", "process_group": ("0", "default_pg")}
    good = pickle.dumps({"version": "2.10", "entries": [entry], "pg_config": {}, "pg_status": {}}, protocol=2)
    assert read_dump(good, context, draft)
    assert draft.lists["flight_records"][0].rank == 3
    assert not read_dump(pickle.dumps(print), context, draft)


def test_every_format_of_the_gpu_layer_is_entered_in_the_table() -> None:
    assert {"nvidia-smi", "nvidia-smi -q", "nvidia-smi query", "nvidia-smi topo", "NCCL RAS", "kernel log"} <= {
        f.name for f in formats()
    }


def test_a_dump_that_a_watchdog_has_left_in_the_log_is_read_as_stacks(tmp_path: Path) -> None:
    site = "/venv/lib/python3.12/site-packages"
    text = (
        "(Worker_TP0 pid=300) ERROR 09-05 01:24:34 [x.py:1] Timeout (0:05:00)!\n"
        "(Worker_TP0 pid=300) Thread 0x00007f1122334455 (most recent call first):\n"
        f'(Worker_TP0 pid=300)   File "{site}/torch/cuda/streams.py", line 232 in synchronize\n'
        f'(Worker_TP0 pid=300)   File "{site}/vllm/v1/worker/gpu_worker.py", line 612 in execute_model\n'
        "(EngineCore pid=200) INFO 09-05 01:24:35 [core.py:1] more of the log\n"
    )
    seen = pasted(tmp_path, vllm=text)
    (process,) = [p for p in seen.processes if p.pid == 300]
    assert process.title == "VLLM::Worker_TP0"
    threads = process.stacks[0].threads
    assert isinstance(threads, tuple)
    assert [(f.name, f.file) for f in threads[0].frames] == [
        ("synchronize", "torch/cuda/streams.py"),
        ("execute_model", "vllm/v1/worker/gpu_worker.py"),
    ]

"""The GPU layer by rank: which device is whose, who differs, and the page that says so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.unit.diagnosis.scenario import WORKER0, WORKER_ALL_REDUCE, Server
from tests.unit.gpu.test_collectives import read
from vllmdiag.diagnosis.case import Case
from vllmdiag.diagnosis.devices import device_of, spinning
from vllmdiag.diagnosis.gpu_view import outliers
from vllmdiag.diagnosis.scene import scene_of
from vllmdiag.diagnosis.view import view
from vllmdiag.model.gpu import (
    Accelerator,
    DeviceProcess,
    Driver,
    FlightEntry,
    FlightGroup,
    FlightRecord,
    NvLink,
    RankView,
    RasCommunicator,
    RasRank,
    RasReport,
    Reading,
    Trouble,
)
from vllmdiag.model.snapshot import KernelLine, Snapshot, Viewer
from vllmdiag.model.view import GpuView
from vllmdiag.render.gpu import gpu_text
from vllmdiag.render.page import Style

GIB = 1 << 30
HOST_PID_NAMESPACE = 4026531836
EVERY_MINOR = tuple(f"/dev/nvidia{n}" for n in range(8))


def device(index: int, **more: object) -> Accelerator:
    readings = tuple(reading(t) for t in (0.1, 3.0))
    one = Accelerator(
        vendor="nvidia",
        index=index,
        minor=index,
        name="NVIDIA H200",
        uuid=f"GPU-{index}",
        pci=f"0000:{61 + index}:00.0",
        readings=readings,
    )
    return msgspec.structs.replace(one, **more)


def reading(t: float = 3.0, busy: int | None = 100, **more: object) -> Reading:
    one = Reading(
        t=t,
        busy_pct=busy,
        memory_busy_pct=0,
        power_w=128.0,
        power_limit_w=700.0,
        temperature_c=41,
        clock_mhz=1980,
        clock_max_mhz=1980,
        memory_used=126 * GIB,
        memory_total=140 * GIB,
        throttle=(),
        links=tuple(NvLink(number=n, up=True, errors=0) for n in range(4)),
    )
    return msgspec.structs.replace(one, **more)


def at(busy: int, **more: object) -> tuple[Reading, ...]:
    return tuple(reading(t, busy, **more) for t in (0.1, 3.0))


def snapshot(tp: int = 8, files: Sequence[str] = EVERY_MINOR, **more: object) -> Snapshot:
    server = Server(tp=tp)
    server.stacks = dict.fromkeys(server.workers, WORKER_ALL_REDUCE)
    server.processes = {pid: {"device_files": ("/dev/nvidiactl", *files)} for pid in server.workers}
    fields: dict[str, object] = {"accelerators": tuple(device(i) for i in range(tp)), **more}
    return msgspec.structs.replace(server.snapshot(), **fields)


def layer(seen: Snapshot) -> GpuView:
    (found,) = view(seen).gpu
    return found


def mapped(seen: Snapshot) -> list[tuple[int | None, str]]:
    return [(row.device, row.device_known_by) for row in layer(seen).ranks if row.pid is not None]


def with_worker(seen: Snapshot, number: int, **more: object) -> Snapshot:
    processes = tuple(msgspec.structs.replace(p, **more) if p.pid == WORKER0 + number else p for p in seen.processes)
    return msgspec.structs.replace(seen, processes=processes)


# -- whose device -----------------------------------------------------------------------------------------------------


def test_the_one_device_file_that_a_rank_has_open_is_its_device() -> None:
    seen = with_worker(snapshot(tp=2), 0, device_files=("/dev/nvidiactl", "/dev/nvidia1"))
    assert mapped(seen)[0] == (1, "its open device file")


def test_pids_of_the_driver_are_believed_in_the_namespace_of_the_host_alone() -> None:
    devices = tuple(device(i, processes=(DeviceProcess(pid=WORKER0 + 1 - i),)) for i in range(2))
    viewer = Viewer(pid=1, uid=0, access="full", namespaces={"pid": HOST_PID_NAMESPACE})
    here = snapshot(tp=2, accelerators=devices, viewer=viewer)
    assert mapped(here) == [(1, "the driver's list of processes"), (0, "the driver's list of processes")]
    inside = msgspec.structs.replace(viewer, namespaces={"pid": 4026532000})
    assert mapped(msgspec.structs.replace(here, viewer=inside)) == [
        (0, "its rank among the visible devices"),
        (1, "its rank among the visible devices"),
    ]


def ras_of_workers(name: str, form: str = "json") -> RasReport:
    """A recorded report whose ranks are the workers of the scenario."""
    report = read(name, form)
    communicators = tuple(
        msgspec.structs.replace(
            c,
            ranks=tuple(msgspec.structs.replace(r, pid=WORKER0 + r.rank) for r in c.ranks),
            missing=tuple(msgspec.structs.replace(r, pid=WORKER0 + r.rank) for r in c.missing),
        )
        for c in report.communicators
    )
    return msgspec.structs.replace(report, communicators=communicators)


def test_nccl_tells_the_device_of_a_rank_on_the_same_machine_but_not_in_a_container() -> None:
    seen = snapshot(ras=(ras_of_workers("healthy_tp8"),))
    assert mapped(seen)[3] == (3, "NCCL")
    assert mapped(with_worker(seen, 3, nspids=(WORKER0 + 3, 12)))[3] == (None, "")


@pytest.mark.parametrize(("visible", "wanted"), [("3,1", [3, 1]), ("GPU-2,GPU-0", [2, 0]), ("1", [1, None])])
def test_the_visible_devices_are_counted_by_rank(visible: str, wanted: list[int | None]) -> None:
    seen = snapshot(tp=2, accelerators=tuple(device(i) for i in range(4)))
    for worker in (0, 1):
        seen = with_worker(seen, worker, environ={"CUDA_VISIBLE_DEVICES": visible})
    assert [index for index, _ in mapped(seen)] == wanted


def test_a_process_without_a_device_open_has_none() -> None:
    seen = with_worker(snapshot(tp=2), 0, device_files=())
    scene = scene_of(seen)
    assert scene is not None
    assert device_of(scene, scene.processes[WORKER0]) == (None, "")


def test_a_device_of_another_vendor_is_not_taken_for_the_one_with_the_same_number() -> None:
    other = device(0, vendor="amd", minor=None)
    seen = snapshot(tp=1, accelerators=(other, device(0)))
    assert [(row.device, row.device_known_by) for row in layer(seen).ranks] == [
        (0, "its rank among the visible devices")
    ]
    scene = scene_of(with_worker(seen, 0, device_files=("/dev/kfd", "/dev/dri/renderD128")))
    assert scene is not None
    assert device_of(scene, scene.processes[WORKER0])[0] == other


# -- a kernel that waits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "wanted"),
    [
        (at(100), True),
        (at(100, power_w=512.0), False),
        (at(100, memory_busy_pct=61), False),
        (at(0, power_w=74.0), False),
        ((reading(0.1), reading(3.0, 30)), False),
        (at(100, power_w=None), None),
        ((reading(),), None),
    ],
)
def test_full_load_with_little_power_and_no_memory_traffic_is_a_kernel_that_waits(
    readings: tuple[Reading, ...], wanted: bool | None
) -> None:
    assert spinning(device(0, readings=readings)) is wanted


def test_of_a_partitioned_device_nothing_is_said() -> None:
    assert spinning(device(0, mig=True)) is None


# -- who differs ------------------------------------------------------------------------------------------------------


def differs(seen: Snapshot) -> dict[str, tuple[str, ...]]:
    return {row.label: row.differs for row in layer(seen).ranks if row.differs}


def test_ranks_that_agree_do_not_differ() -> None:
    assert differs(snapshot()) == {}


def test_the_idle_device_among_busy_ones_is_the_rank_that_did_not_arrive() -> None:
    devices = tuple(device(i, readings=at(0, power_w=74.0)) if i == 5 else device(i) for i in range(8))
    assert differs(snapshot(accelerators=devices)) == {"Worker_TP5": ("0 % busy, the others 100 %",)}


def test_a_rank_that_holds_less_memory_or_runs_slower_or_lost_links_differs() -> None:
    changes: dict[int, dict[str, object]] = {
        1: {"memory_used": 20 * GIB},
        2: {"clock_mhz": 345, "throttle": ("hardware thermal slowdown",)},
        3: {"links": (NvLink(number=0, up=False), *(NvLink(number=n, up=True) for n in (1, 2, 3)))},
    }
    devices = tuple(device(i, readings=at(100, **changes.get(i, {}))) for i in range(8))
    assert differs(snapshot(accelerators=devices)) == {
        "Worker_TP1": ("holds 20 GiB, the others 126 GiB",),
        "Worker_TP2": ("clock 345 of 1980 MHz",),
        "Worker_TP3": ("3 links up, the others 4",),
    }


def test_a_device_that_is_held_down_in_every_reading_is_in_trouble_and_the_care_for_power_is_none() -> None:
    hot, capped = ("software power cap", "hardware slowdown"), ("software power cap",)
    devices = (
        device(0, readings=at(100, throttle=hot)),
        device(1, readings=at(100, throttle=capped)),
        device(2, readings=(reading(0.1), reading(3.0, throttle=hot))),
    )
    found = {row.label: [t.text for t in row.troubles] for row in layer(snapshot(tp=3, accelerators=devices)).ranks}
    assert found == {"Worker_TP0": ["slowed down: hardware slowdown"], "Worker_TP1": [], "Worker_TP2": []}


def test_of_two_ranks_neither_is_the_odd_one() -> None:
    rows = [RankView(label="a", busy_pct=100), RankView(label="b", busy_pct=0)]
    assert outliers(rows) == [(), ()]


def test_what_is_not_known_of_a_rank_is_no_difference() -> None:
    rows = [RankView(label=str(i), busy_pct=100) for i in range(4)]
    assert outliers([*rows, RankView(label="dark")]) == [()] * 5


def test_the_rank_whose_count_lags_is_named_in_its_row_and_in_the_communicator() -> None:
    seen = snapshot(ras=(ras_of_workers("lag_rank3"), ras_of_workers("lag_rank3")))
    assert differs(seen) == {"Worker_TP3": ("launched 811 AllReduce, others 812",)}
    (communicator,) = layer(seen).communicators
    assert communicator.findings == (
        "Worker_TP3 launched 811 AllReduce, others 812: has not come to the next one (not moving)",
    )
    assert communicator.counts == "AllGather 40"
    assert len(layer(seen).limits) == 3


def test_counts_of_two_communicators_are_not_compared_with_each_other() -> None:
    def communicator(name: str, workers: range, count: int) -> RasCommunicator:
        ranks = tuple(RasRank(rank=i, pid=WORKER0 + w, counts={"AllReduce": count}) for i, w in enumerate(workers))
        return RasCommunicator(hash=name, size=len(ranks), ranks=ranks)

    report = RasReport(communicators=(communicator("a1", range(6), 812), communicator("b2", range(6, 8), 5)))
    seen = snapshot(ras=(report, report))
    assert [row.collectives["AllReduce"] for row in layer(seen).ranks] == [812] * 6 + [5] * 2
    assert differs(seen) == {}


def test_a_rank_that_nccl_takes_for_dead_is_told_by_its_label() -> None:
    (communicator,) = layer(snapshot(ras=(ras_of_workers("killed_70s"),))).communicators
    assert communicator.findings[0].startswith("Worker_TP5 is dead to NCCL")


# -- health -----------------------------------------------------------------------------------------------------------


def test_xids_of_the_kernel_log_belong_to_the_device_at_that_address() -> None:
    lines = tuple(
        KernelLine(t=float(i), text=f"NVRM: Xid (PCI:0000:63:00): {xid}, pid=1, name=python, x")
        for i, xid in enumerate((79, 79, 63))
    )
    rows = {row.label: row.troubles for row in layer(snapshot(kernel_lines=lines)).ranks if row.troubles}
    assert list(rows) == ["Worker_TP2"]
    assert [(t.code, t.critical) for t in rows["Worker_TP2"]] == [("xid-79", True), ("xid-63", False)]
    assert rows["Worker_TP2"][0].text == "Xid 79 (2 times): the GPU fell off the bus"


def test_link_errors_that_grow_within_the_window_are_a_trouble_and_old_ones_are_not() -> None:
    def links(errors: int) -> tuple[NvLink, ...]:
        return (NvLink(number=0, up=True, errors=errors), NvLink(number=1, up=True, errors=9))

    growing = device(0, readings=(reading(0.1, links=links(0)), reading(3.0, links=links(4))))
    (row, *_) = layer(snapshot(tp=1, accelerators=(growing,))).ranks
    assert [t.code for t in row.troubles] == ["link-errors"]
    assert "NVLink 0 grow" in row.troubles[0].text


def test_a_device_in_trouble_that_is_nobodys_has_a_row_of_its_own() -> None:
    lost = device(7, minor=None, readings=(), troubles=(Trouble(code="lost", text="fell off the bus", critical=True),))
    rows = layer(snapshot(tp=2, accelerators=(device(0), device(1), lost))).ranks
    assert [(row.label, row.pid) for row in rows[2:]] == [("GPU 7", None)]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(seen: Snapshot, verbose: int = 0) -> str:
    return gpu_text(view(seen), Style(verbose=verbose))


def test_ranks_that_agree_are_one_row_and_the_odd_one_is_named_with_the_reason() -> None:
    devices = tuple(device(i, readings=at(0, power_w=74.0)) if i == 5 else device(i) for i in range(8))
    report = ras_of_workers("lag_rank3")
    text = page(
        snapshot(
            accelerators=devices,
            ras=(report, report),
            drivers=(Driver(vendor="nvidia", version="580.95.05", runtime="13.0"),),
        )
    )
    lines = text.splitlines()
    assert lines[1] == "nvidia driver 580.95.05 · CUDA 13.0"
    rows = [line.split("  ") for line in lines if line.strip().startswith("Worker_TP")]
    assert rows[0][1] == "Worker_TP0-2,4,6-7 (6)"
    assert "100%" in text
    assert "128 of 700 W" in text
    assert "a kernel waits" in text
    assert "  Worker_TP5 (pid 305), GPU 5\n    · 0 % busy, the others 100 %" in text
    assert "  Worker_TP3 (pid 303), GPU 3\n    · launched 811 AllReduce, others 812" in text
    assert "NCCL 2.30.7: 1 communicator" in text
    assert "NCCL's view has limits: counts are of launches" in text


def test_every_rank_has_a_row_with_verbose() -> None:
    assert sum(line.startswith("  Worker_TP") for line in page(snapshot(), verbose=1).splitlines()) == 8


def test_a_driver_that_hangs_is_said_before_the_rows() -> None:
    hung = Driver(vendor="nvidia", problem="hangs", text="NVML hangs in the call power on GPU 4", next="dmesg")
    assert "! NVML hangs in the call power on GPU 4" in page(snapshot(drivers=(hung,)))


def test_dumps_that_do_not_agree_are_told_with_the_rank() -> None:
    def dump(rank: int, *seqs: int) -> FlightRecord:
        entries = tuple(FlightEntry(seq=seq, op="all_reduce", sizes=((4,),), dtypes=("Half",)) for seq in seqs)
        group = FlightGroup(name="3", description="tp", entries=entries, enqueued=seqs[-1])
        return FlightRecord(rank=rank, age_s=41.0, groups=(group,))

    text = page(snapshot(tp=2, flight_records=(dump(0, 8, 9), dump(1, 8))))
    assert "flight recorder: dumps of rank 0-1" in text
    assert "group 3 tp, collective 9, written 41 s ago: all_reduce of 4 Half, rank 0 waits: rank 1 has not" in text


def test_an_instance_without_any_gpu_shows_what_its_stacks_say() -> None:
    text = page(snapshot(tp=2, files=(), accelerators=()))
    assert "all_reduce" in text
    assert "NCCL" not in text


def test_the_layer_is_built_from_the_same_case_as_the_verdict() -> None:
    scene = scene_of(snapshot(tp=2))
    assert scene is not None
    case = Case(scene)
    assert [row.doing for row in layer(snapshot(tp=2)).ranks] == [case.acts[w.pid].doing for w in scene.workers]

"""The GPU layer on processes that look like a vLLM with NCCL: whom it asks, what it starts, what it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.gpu import fake_ras
from tests.unit.sources.fakes import free_port
from vllmdiag.cli.main import main
from vllmdiag.diagnosis.collectives import lagging
from vllmdiag.diagnosis.view import view
from vllmdiag.model.base import Missing
from vllmdiag.model.process import Limits, Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.sockets import Socket, SocketOwner
from vllmdiag.sources import accelerators, stacks
from vllmdiag.sources.amdgpu import AmdGpu
from vllmdiag.sources.collect import collect
from vllmdiag.sources.gpu_layer import GpuLayer

HERE = Path(__file__).parent
Start = Callable[..., list[int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an instance; the pids of the server, the engine and the workers in rank order."""
    started: list[subprocess.Popen[str]] = []

    def run(sample: str = "healthy_tp8", workers: int = 8, listen: bool = True) -> list[int]:
        program = tmp_path / "vllm"
        program.write_text((HERE / "fake_instance.py").read_text())
        (tmp_path / "libnccl.so.2").write_bytes(b"\0" * 4096)
        options = {"--port": free_port(), "--sample": sample, "--workers": workers, "--directory": tmp_path}
        words = [str(word) for pair in {**options, "--listen": int(listen)}.items() for word in pair]
        environment = {
            **os.environ,
            "NCCL_RAS_ADDR": f"localhost:{free_port()}",
            "FAKE_RAS_DIRECTORY": str(Path(fake_ras.__file__).parent),
        }
        command = [sys.executable, "-S", str(program), "serve", "model", *words]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(child)
        assert child.stdout is not None
        pids: list[int] = json.loads(child.stdout.readline())
        return pids

    yield run
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture(autouse=True)
def no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are another layer; ten py-spy at a time would starve the answers that are tested here."""
    hole = Missing(what="stacks", why="not asked for in this test", next="")
    monkeypatch.setattr(stacks, "find_py_spy", lambda: hole)


def look(pids: list[int], depth: str = "gpu", window_s: float = 1.2) -> Snapshot:
    return collect(pids[0], window_s=window_s, depth=depth)


def what_is_missing(seen: Snapshot) -> dict[str, str]:
    return {hole.what: hole.why for hole in seen.missing}


@pytest.mark.parametrize("depth", ["gpu", "diagnose"])
def test_nccl_is_asked_twice_and_the_lagging_rank_is_named(start: Start, depth: str) -> None:
    seen = look(start("lag_rank3"), depth)
    assert len(seen.ras) == 2
    assert seen.ras[1].t - seen.ras[0].t >= 1.0
    assert {report.pid for report in seen.ras} <= set(seen.target_pids)
    (lag,) = lagging(seen)
    assert (lag.ranks[0].rank, lag.relation, lag.moving) == (3, "behind", False)
    (layer,) = view(seen).gpu
    assert {row.label: row.differs for row in layer.ranks if row.differs} == {
        "Worker_TP3": ("launched 811 AllReduce, others 812",)
    }


@pytest.mark.parametrize("depth", ["ps", "ring", "stacks", "client"])
def test_no_other_verb_asks(start: Start, depth: str) -> None:
    assert look(start(workers=2), depth, window_s=0.5).ras == ()


def test_where_nobody_listens_that_is_missing_and_nobody_is_connected_to(start: Start) -> None:
    seen = look(start(workers=2, listen=False), window_s=0.5)
    assert seen.ras == ()
    assert "no rank listens on port" in what_is_missing(seen)["NCCL RAS"]


def test_a_job_whose_every_rank_is_stopped_is_missing_with_the_reason(start: Start) -> None:
    pids = start(workers=2)
    for pid in pids[2:]:
        os.kill(pid, signal.SIGSTOP)
    seen = look(pids, window_s=0.5)
    assert seen.ras == ()
    assert "does not answer: it is stopped" in what_is_missing(seen)["NCCL RAS"]


def test_the_verb_prints_a_row_for_each_rank_and_the_communicator(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = start("lag_rank3")
    assert main(["gpu", str(pids[0])]) == 0
    out = capsys.readouterr().out
    assert f"Worker_TP3 (pid {pids[5]})" in out
    assert "NCCL 2.30.7: 1 communicator" in out
    assert main(["gpu", str(pids[0]), "--format", "json", "--window", "0.5", "--trigger-fr"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [row["label"] for row in document["gpu"][0]["ranks"]] == [f"Worker_TP{i}" for i in range(8)]
    assert document["members"] == []
    assert "asks every rank for a dump" in printed.err
    assert any(hole["what"] == "flight recorder" for hole in document["missing"])


# -- what is started --------------------------------------------------------------------------------------------------


def worker(pid: int = 70, **more: object) -> Process:
    return Process(pid=pid, **more)  # type: ignore[arg-type]


def layer_of(*processes: Process, root: Path, thorough: bool = False, sockets: tuple[Socket, ...] = ()) -> GpuLayer:
    stop = threading.Event()
    users = {process.pid for process in processes}
    return GpuLayer(processes, users, sockets, time.monotonic, 0.0, stop, thorough=thorough, root=str(root))


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.usefixtures("no_child")
def test_on_a_machine_without_gpus_a_diagnosis_starts_nothing_and_misses_nothing(tmp_path: Path) -> None:
    layer = layer_of(worker(), root=tmp_path)
    assert layer.works() == []
    assert layer.add_to(Snapshot()) == Snapshot()


@pytest.mark.usefixtures("no_child")
def test_the_gpu_verb_says_that_there_is_none(tmp_path: Path) -> None:
    (hole,) = layer_of(worker(), root=tmp_path, thorough=True).add_to(Snapshot()).missing
    assert hole == Missing(
        what="GPUs", why="this machine shows none: no /dev/nvidia*, no amdgpu", next="run it where the GPUs are"
    )


def test_devices_of_the_server_that_this_shell_does_not_see_are_told(tmp_path: Path) -> None:
    (hole,) = layer_of(worker(device_files=("/dev/nvidia0",)), root=tmp_path).add_to(Snapshot()).missing
    assert "has /dev/nvidia0 open, and this shell does not see such a device" in hole.why


def test_a_card_without_its_driver_is_told_by_its_address(tmp_path: Path) -> None:
    card = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:61:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    assert "there is a card at 0000:61:00.0" in accelerators.why_none((), str(tmp_path)).why


@pytest.mark.needs("cc")
def test_nvml_is_read_where_there_are_device_files(
    tmp_path: Path, stub_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory))
    monkeypatch.setenv("NVMLSTUB", "lost=5")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    layer = layer_of(worker(), root=tmp_path)
    for work in layer.works():
        work()
    seen = layer.add_to(Snapshot())
    layer.close()
    assert [len(d.readings) for d in seen.accelerators] == [2, 2, 2, 2, 2, 0, 2, 2]
    assert [d.version for d in seen.drivers] == ["580.95.05"]
    assert (seen.missing, [cost.source for cost in seen.costs]) == ((), ["devices"])


@pytest.mark.needs("cc")
def test_a_driver_that_is_not_loaded_is_missing_with_what_to_do(
    tmp_path: Path, stub_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory))
    monkeypatch.setenv("NVMLSTUB", "nodriver")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    layer = layer_of(worker(), root=tmp_path)
    for work in layer.works():
        work()
    (hole,) = layer.add_to(Snapshot()).missing
    layer.close()
    assert (hole.what, hole.next) == ("nvidia GPUs", "lsmod | grep nvidia; modprobe nvidia")


def listener(pid: int, port: int = 28028, local: str = "127.0.0.1") -> Socket:
    owners = (SocketOwner(pid=pid, fds=(3,)),)
    return Socket(family="tcp", inode=1, state="LISTEN", local=f"{local}:{port}", owners=owners)


NCCL = ("/v/lib/libnccl.so.2",)


@pytest.mark.parametrize(
    ("process", "socket", "asked"),
    [
        (worker(libraries=NCCL), listener(70), True),
        (worker(libraries=("/v/lib/librccl.so.1",)), listener(70), True),
        (worker(libraries=NCCL), listener(70, port=29500), False),  # some other port of torch
        (worker(libraries=()), listener(70), False),  # not NCCL: it may be anything
        (worker(libraries=NCCL), listener(71), False),  # another program holds the port
        (worker(libraries=NCCL, n_fds=1000, limits=Limits(nofile=1024)), listener(70), False),  # descriptors run out
        (worker(libraries=NCCL, environ={"NCCL_RAS_ADDR": "localhost:29500"}), listener(70, port=29500), True),
        (worker(libraries=NCCL, environ={"NCCL_RAS_ADDR": "localhost:29500"}), listener(70), False),
    ],
)
def test_only_a_port_of_ras_that_a_process_with_nccl_listens_on_is_connected_to(
    process: Process, socket: Socket, asked: bool, tmp_path: Path
) -> None:
    layer = layer_of(process, root=tmp_path, sockets=(socket,))
    assert bool(layer._listeners) == asked


def test_one_rank_without_a_communicator_is_no_gap_of_a_diagnosis(tmp_path: Path) -> None:
    assert layer_of(worker(libraries=NCCL), root=tmp_path).add_to(Snapshot()).missing == ()
    several = layer_of(worker(libraries=NCCL), worker(71, libraries=NCCL), root=tmp_path)
    assert [hole.what for hole in several.add_to(Snapshot()).missing] == ["NCCL RAS"]


def test_ras_that_was_switched_off_is_told_as_that(tmp_path: Path) -> None:
    off = worker(libraries=NCCL, environ={"NCCL_RAS_ENABLE": "0"})
    holes = layer_of(off, root=tmp_path, thorough=True).add_to(Snapshot()).missing
    assert "NCCL_RAS_ENABLE=0" in holes[-1].why


# -- AMD --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """Two cards as amdgpu shows them."""
    for number, busy in enumerate((97, 3)):
        device = tmp_path / "sys" / "devices" / f"0000:0{number + 3}:00.0"
        hwmon = device / "hwmon" / "hwmon4"
        hwmon.mkdir(parents=True)
        (device / "ras").mkdir()
        files = {
            "gpu_busy_percent": busy,
            "mem_busy_percent": 1,
            "mem_info_vram_used": 20 << 30,
            "mem_info_vram_total": 192 << 30,
            "unique_id": "4a5b",
            "ras/umc_err_count": f"ue: {number}\nce: 3",
            "hwmon/hwmon4/power1_average": 150_000_000,
            "hwmon/hwmon4/power1_cap": 750_000_000,
            "hwmon/hwmon4/temp1_input": 41_000,
            "hwmon/hwmon4/freq1_input": 2_100_000_000,
        }
        for name, value in files.items():
            (device / name).write_text(f"{value}\n")
        (tmp_path / "sys" / "module" / "amdgpu").mkdir(parents=True, exist_ok=True)
        drm = tmp_path / "sys" / "class" / "drm"
        for name in (f"card{number}", f"card{number}-DP-1"):
            (drm / name).mkdir(parents=True)
        (drm / f"card{number}" / "device").symlink_to(device)
    return tmp_path


def test_amd_devices_are_read_from_the_files_of_their_driver(amd: Path) -> None:
    assert [backend.vendor for backend in accelerators.present(str(amd))] == ["amd"]
    probe = AmdGpu(lambda: 0.5, str(amd))
    for _ in range(2):
        probe.read(time.monotonic() + 20)
    driver, devices = probe.result()
    assert (driver.vendor, driver.problem) == ("amd", "")
    assert [(d.pci, d.ecc_uncorrected, len(d.readings)) for d in devices] == [
        ("0000:03:00.0", 0, 2),
        ("0000:04:00.0", 1, 2),
    ]
    last = devices[0].readings[-1]
    assert (last.busy_pct, last.memory_busy_pct, last.power_w, last.power_limit_w) == (97, 1, 150.0, 750.0)
    assert (last.temperature_c, last.clock_mhz, last.memory_used, last.memory_total) == (41, 2100, 20 << 30, 192 << 30)


def test_a_driver_of_amd_that_does_not_answer_is_the_finding(amd: Path) -> None:
    stuck = amd / "sys" / "devices" / "0000:03:00.0" / "gpu_busy_percent"
    stuck.unlink()
    os.mkfifo(stuck)  # reading it waits for ever
    probe = AmdGpu(lambda: 0.5, str(amd))
    probe.read(time.monotonic() + 1.0)
    driver, devices = probe.result()
    assert driver.problem == "hangs"
    assert [t.code for t in devices[0].troubles] == ["hangs"]


@pytest.mark.needs("cc")
def test_a_hang_inside_nvml_is_missing_and_names_the_call_and_the_child_that_is_late(
    tmp_path: Path, stub_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory))
    monkeypatch.setenv("NVMLSTUB", "hang=4")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    layer = layer_of(worker(), root=tmp_path)
    for work in layer.works():
        work()
    seen = layer.add_to(Snapshot())
    layer.close()
    (hole,) = seen.missing
    assert hole.what == "nvidia GPUs"
    assert "power on GPU 4" in hole.why
    assert "the child is in state S" in hole.why
    assert [d.problem for d in seen.drivers] == ["hangs"]
    assert [t.code for t in seen.accelerators[4].troubles] == ["hangs"]

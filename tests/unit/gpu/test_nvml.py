"""The real pynvml on a stub driver: eight GPUs, and all that can be wrong with them or with the driver itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.gpu.conftest import Look
from vllmdiag.diagnosis.devices import spinning
from vllmdiag.sources import nvml_child
from vllmdiag.sources.nvml import Nvml, short_pci

pytestmark = pytest.mark.needs("cc")


def test_eight_gpus_are_read_twice_with_all_that_the_driver_offers(look: Look) -> None:
    driver, devices = look("")
    assert (driver.version, driver.runtime, driver.problem) == ("580.95.05", "13.0", "")
    assert [d.index for d in devices] == list(range(8))
    assert {len(d.readings) for d in devices} == {2}
    assert [d.troubles for d in devices] == [()] * 8
    first, last = devices[3].readings
    assert first.t <= last.t
    assert (devices[3].name, devices[3].uuid, devices[3].pci) == ("NVIDIA H200", "GPU-00000003", "0000:64:00.0")
    assert (devices[3].minor, devices[3].mig, devices[3].fabric) == (3, None, "completed")
    assert (last.busy_pct, last.memory_busy_pct, last.power_w, last.power_limit_w) == (100, 0, 128.0, 700.0)
    assert (last.temperature_c, last.slowdown_c, last.clock_mhz, last.clock_max_mhz) == (41, 90, 1980, 1980)
    assert (last.memory_used, last.memory_total) == (135_000_000_000, 150_754_820_096)
    assert (last.pcie_generation, last.pcie_width, last.pcie_width_max, last.throttle) == (5, 16, 16, ())
    assert [(link.number, link.up, link.errors) for link in last.links] == [(n, True, 0) for n in range(4)]
    assert [p.pid for p in devices[3].processes or ()] == [4246]


def test_how_the_gpus_reach_each_other_is_told(look: Look) -> None:
    _, devices = look("nop2p=2")
    assert {d.capability for d in devices} == {"9.0"}
    assert [(p.index, p.path) for p in devices[0].peers] == [(i, "NODE") for i in range(1, 8)]
    assert {p.p2p for p in devices[0].peers} == {"ok"}
    assert {p.p2p for p in devices[2].peers} == {"chipset not supported"}


def test_eight_kernels_that_wait_are_told_from_eight_that_work(look: Look) -> None:
    assert [spinning(device) for device in look("")[1]] == [True] * 8
    assert [spinning(device) for device in look("working")[1]] == [False] * 8
    assert [spinning(device) for device in look("idle=3")[1]] == [True] * 3 + [False] + [True] * 4


def test_a_lost_gpu_is_critical_and_the_others_are_read(look: Look) -> None:
    driver, devices = look("lost=5")
    assert driver.problem == ""
    assert [(t.code, t.critical) for t in devices[5].troubles] == [("lost", True)]
    assert devices[5].readings == ()
    assert {len(d.readings) for d in devices if d.index != 5} == {2}


def test_remapped_rows_name_the_reset_that_the_driver_asks_for(look: Look) -> None:
    _, devices = look("remapped=2 ecc=2")
    assert devices[2].rows_remapped == 2
    assert devices[2].ecc_uncorrected == 7
    assert {t.code for t in devices[2].troubles} == {"ecc", "rows-pending", "recovery"}
    assert "reset the GPU" in next(t.text for t in devices[2].troubles if t.code == "recovery")
    assert [d.troubles for d in devices if d.index != 2] == [()] * 7


def test_a_throttled_gpu_tells_why_and_how_hot_it_is(look: Look) -> None:
    _, devices = look("throttled=6")
    last = devices[6].readings[-1]
    assert last.throttle == ("hardware slowdown", "hardware thermal slowdown")
    assert (last.temperature_c, last.clock_mhz) == (93, 345)


def test_a_gpu_that_is_not_in_the_fabric_and_a_link_that_is_down_are_told(look: Look) -> None:
    _, devices = look("nofabric=1 linkdown=7")
    assert [t.code for t in devices[1].troubles] == ["fabric"]
    assert [link.number for link in devices[7].readings[-1].links if not link.up] == [3]


def test_a_call_that_does_not_return_is_the_finding_and_names_call_and_gpu(look: Look) -> None:
    driver, devices = look("hang=4", patience_s=5.0)
    assert driver.problem == "hangs"
    assert "power_w" not in driver.text
    assert "power on GPU 4" in driver.text
    assert "state S" in driver.text
    assert [t.code for t in devices[4].troubles] == ["hangs"]
    assert {d.readings[0].busy_pct for d in devices[:4]} == {100}  # what was read before is kept


def test_nothing_is_asked_after_a_call_that_did_not_return(look: Look) -> None:
    driver, devices = look("hang=0", rounds=3, patience_s=3.0)
    assert driver.problem == "hangs"
    assert len(devices[0].readings) <= 1


def test_a_child_that_hangs_is_killed(stub_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory))
    monkeypatch.setenv("NVMLSTUB", "hang=0")
    probe = Nvml(time.monotonic)
    probe.read(time.monotonic() + 2.0)
    assert probe._child is not None
    pid = probe._child._process.pid
    probe.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("ails", "problem", "words"),
    [
        ("nodriver", "not-loaded", "kernel module is not loaded"),
        ("mismatch", "version-mismatch", "updated without a reboot"),
        ("noperm", "no-permission", "/dev/nvidia* cannot be opened"),
    ],
)
def test_each_failure_of_the_driver_has_a_message_of_its_own(look: Look, ails: str, problem: str, words: str) -> None:
    driver, devices = look(ails)
    assert (driver.problem, devices) == (problem, ())
    assert words in driver.text
    assert driver.next


def test_a_version_mismatch_names_the_module_that_is_loaded(look: Look, tmp_path: Path) -> None:
    module = tmp_path / "sys" / "module" / "nvidia"
    module.mkdir(parents=True)
    (module / "version").write_text("570.86.15\n")
    driver, _ = look("mismatch", root=tmp_path)
    assert "kernel module 570.86.15" in driver.text


def test_without_the_library_of_the_driver_that_is_what_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library at all")  # found first, and cannot be loaded
    probe = Nvml(time.monotonic)
    try:
        probe.read(time.monotonic() + 60.0)
        assert probe.result()[0].problem == "no-library"
    finally:
        probe.close()


def test_without_the_python_library_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = Nvml(time.monotonic)
    try:
        probe.read(time.monotonic() + 60.0)
        driver, _ = probe.result()
        assert (driver.problem, driver.next) == ("no-binding", "pip install nvidia-ml-py")
    finally:
        probe.close()


def test_a_driver_that_kills_its_caller_is_told_with_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import os\ndef nvmlInit(): os._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = Nvml(time.monotonic)
    try:
        probe.read(time.monotonic() + 60.0)
        driver, devices = probe.result()
        assert (driver.problem, devices) == ("died", ())
        assert "in the call init" in driver.text
    finally:
        probe.close()


def test_a_driver_that_computes_for_ever_is_told_as_slow_and_not_as_hung(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pynvml.py").write_text("def nvmlInit():\n    while True: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = Nvml(time.monotonic)
    try:
        probe.read(time.monotonic() + 3.0)
        assert probe.result()[0].problem == "slow"
    finally:
        probe.close()


def test_no_module_of_the_current_directory_is_run(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import pathlib; pathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    driver, devices = look("")
    assert (driver.problem, len(devices)) == ("", 8)
    assert not (tmp_path / "ran").exists()


def test_the_child_ends_with_its_input(stub_directory: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub_directory)}
    command = [sys.executable, nvml_child.__file__]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == '["end", 0]'
    assert done.stderr == ""


@pytest.mark.parametrize("address", ["00000000:61:00.0", "0000:61:00", "0000:61:00.0", "00000000:61:00.0".upper()])
def test_a_pci_address_is_the_same_however_it_is_written(address: str) -> None:
    assert short_pci(address) == "0000:61:00.0"

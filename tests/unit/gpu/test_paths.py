"""What joins GPUs, read from a recorded tree of sysfs, and for what a library holds kernels."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from vllmdiag.model.gpu import Accelerator, Bridge
from vllmdiag.sources.fatbin import architectures
from vllmdiag.sources.pci_paths import redirects, surroundings

GPU0, GPU1, CARD0, CARD3 = "0000:41:00.0", "0000:61:00.0", "0000:42:00.0", "0000:62:00.0"
BRIDGE0, BRIDGE1 = "0000:40:03.1", "0000:60:03.1"


def configuration(control: int | None) -> bytes:
    """The configuration space of a bridge: an AER capability first, then ACS where `control` is given."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | (0x148 << 20 if control is not None else 0)).to_bytes(4, "little")
    if control is not None:
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two GPUs, each below a bridge with an RDMA card beside it; the card of the second is down."""
    for bridge, gpu, card, group, number, state in (
        (BRIDGE0, GPU0, CARD0, "31", 0, "4: ACTIVE"),
        (BRIDGE1, GPU1, CARD3, "42", 3, "1: DOWN"),
    ):
        above = tmp_path / "sys/devices" / f"pci{bridge[:7]}" / bridge
        for device in (gpu, card):
            (above / device).mkdir(parents=True)
        (above / "config").write_bytes(configuration(0x001D if number == 0 else 0x0011))
        links = tmp_path / "sys/bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        for device, target in ((bridge, above), (gpu, above / gpu), (card, above / card)):
            (links / device).symlink_to(os.path.relpath(target, links))
        kind = tmp_path / "sys/kernel/iommu_groups" / group
        kind.mkdir(parents=True)
        (kind / "type").write_text("DMA-FQ\n" if number == 0 else "identity\n")
        (above / gpu / "iommu_group").symlink_to(kind)
        port = tmp_path / "sys/class/infiniband" / f"mlx5_{number}" / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port.parents[1] / "device").symlink_to(above / card)
    return tmp_path


DEVICES = (Accelerator(vendor="nvidia", index=0, pci=GPU0), Accelerator(vendor="nvidia", index=1, pci=GPU1))


def test_bridges_groups_and_the_nearest_cards_of_each_gpu(machine: Path) -> None:
    found = surroundings(DEVICES, str(machine))
    assert [d.iommu for d in found.devices] == ["DMA-FQ", "identity"]
    assert [d.bridges for d in found.devices] == [
        (Bridge(pci=BRIDGE0, redirects=True),),
        (Bridge(pci=BRIDGE1, redirects=False),),
    ]
    assert [(p.device, p.state, p.devices) for p in found.rdma] == [
        ("mlx5_0", "ACTIVE", (0,)),
        ("mlx5_3", "DOWN", (1,)),
    ]
    assert found.fabric_manager == ""


def test_where_nothing_is_to_be_seen_everything_stays_unknown(tmp_path: Path) -> None:
    found = surroundings(DEVICES, str(tmp_path))
    assert found.devices == DEVICES
    assert (found.rdma, found.fabric_manager) == ((), "")


@pytest.mark.parametrize(("processes", "state"), [(("nv-fabricmanage",), "running"), (("python",), "not running")])
def test_the_fabric_manager_is_asked_for_only_on_a_machine_with_switches(
    machine: Path, processes: tuple[str, ...], state: str
) -> None:
    (machine / "proc/driver/nvidia-nvswitch/devices/0000:05:00.0").mkdir(parents=True)
    for pid, name in enumerate(("kthreadd", *processes), start=2):
        (machine / "proc" / str(pid)).mkdir(parents=True)
        (machine / "proc" / str(pid) / "comm").write_text(name + "\n")
        (machine / "proc" / str(pid) / "stat").write_text("")
    assert surroundings(DEVICES, str(machine)).fabric_manager == state


@pytest.mark.parametrize(
    ("space", "wanted"),
    [
        (configuration(0x001D), True),
        (configuration(0x0011), False),
        (configuration(None), False),
        (configuration(0x001D)[:64], None),
        (b"", None),
        (b"\xff" * 4096, False),
    ],
    ids=["redirects", "passes", "no ACS", "not root", "gone", "dead"],
)
def test_acs_of_a_bridge(space: bytes, wanted: bool | None) -> None:
    assert redirects(space) is wanted


def fat(*entries: tuple[int, int], payload: int = 40) -> bytes:
    """A fat binary as nvcc makes it: a header, then entries of (kind, architecture)."""
    body = b"".join(
        struct.pack("<HHIQIIHHIIIQQQ", kind, 0x0101, 64, payload, payload, 0, 0, 1, arch, 64, 0, 17, 0, 0)
        + b"\xab" * payload
        for kind, arch in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(directory: Path, content: bytes, section: str = ".nv_fatbin") -> Path:
    """A shared library with that section."""
    blob, made = directory / "blob", directory / "_C.abi3.so"
    blob.write_bytes(content)
    (directory / "empty.c").write_text("int kernels;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, directory / "empty.c"], check=True)
    subprocess.run(["objcopy", "--add-section", f"{section}={blob}", made], check=True)
    return made


@pytest.mark.needs("cc", "objcopy")
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (fat((2, 80), (2, 90)) + b"\0" * 16 + fat((1, 90)), ("compute_90", "sm_80", "sm_90")),
        (fat((2, 120)), ("sm_120",)),
        (fat((2, 7000)), ()),
        (b"\0" * 200, ()),
        (fat((2, 80))[:50], ("sm_80",)),
    ],
    ids=["several", "one", "another layout", "nothing", "cut off"],
)
def test_the_architectures_in_a_library(tmp_path: Path, content: bytes, wanted: tuple[str, ...]) -> None:
    fd = os.open(library(tmp_path, content), os.O_RDONLY)
    try:
        assert set(architectures(fd)) == set(wanted)
    finally:
        os.close(fd)


def test_what_is_no_library_holds_no_kernels(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 100)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        assert architectures(fd) == ()
    finally:
        os.close(fd)

"""Accelerators of any vendor behind one interface: is there any, and if so, read it a few times over the window.

A vendor is one `Backend`: how to see from the file system that its devices are here, which costs nothing, and how to
open a `Probe` on them, which may start a program. On a machine without accelerators nothing is ever opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vllmdiag.model.base import Missing
from vllmdiag.model.gpu import Accelerator, Driver
from vllmdiag.model.process import Process

NVIDIA_PCI, AMD_PCI = "0x10de", "0x1002"
_DISPLAY_CLASS = "0x03"  # VGA and 3D controllers
_NVIDIA_DEVICE = re.compile(r"nvidia(\d+|ctl)")


class Probe(Protocol):
    """The devices of one vendor under observation."""

    def read(self, deadline: float) -> None:
        """Look once more; returns at `deadline` (on `time.monotonic`) whatever the driver does, and never raises."""

    def result(self) -> tuple[Driver, tuple[Accelerator, ...]]:
        """What was seen, and what the driver said of itself."""

    def close(self) -> None:
        """End what was started."""


class Backend(NamedTuple):
    """One vendor."""

    vendor: str
    present: Callable[[str], bool]
    """Device files are here, below a root."""
    open: Callable[[Callable[[], float], str], Probe]
    """A probe that takes its times from the clock given, and files from below a root."""


# A vendor's module is imported when its devices are here: every diagnosis would pay for it.


def _nvidia_here(root: str) -> bool:
    return any(_NVIDIA_DEVICE.fullmatch(name) for name in _names(os.path.join(root, "dev")))


def _nvidia(clock: Callable[[], float], root: str) -> Probe:
    from .nvml import Nvml

    return Nvml(clock, root)


def _amd_here(root: str) -> bool:
    return os.path.isdir(os.path.join(root, "sys", "module", "amdgpu"))


def _amd(clock: Callable[[], float], root: str) -> Probe:
    from .amdgpu import AmdGpu

    return AmdGpu(clock, root)


BACKENDS: tuple[Backend, ...] = (Backend("nvidia", _nvidia_here, _nvidia), Backend("amd", _amd_here, _amd))


def present(root: str = "/") -> tuple[Backend, ...]:
    """The vendors of which this machine (or container) shows devices."""
    return tuple(backend for backend in BACKENDS if backend.present(root))


def why_none(processes: Sequence[Process], root: str = "/") -> Missing:
    """The gap where no device can be seen: none is here, its driver is not loaded, or it is hidden from us."""
    used = sorted({path for process in processes for path in process.device_files})
    if used:
        return Missing(
            what="GPUs",
            why=f"the server has {', '.join(used[:4])} open, and this shell does not see such a device",
            next="run vllmdiag on the host, or inside the container of the server",
        )
    cards = _cards(root)
    if cards:
        return Missing(
            what="GPUs",
            why=f"there is a card at {', '.join(cards)}, but no device file: its driver is not loaded",
            next="lsmod | grep -E 'nvidia|amdgpu'; dmesg -T | grep -iE 'nvrm|amdgpu'",
        )
    return Missing(
        what="GPUs", why="this machine shows none: no /dev/nvidia*, no amdgpu", next="run it where the GPUs are"
    )


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _cards(root: str) -> list[str]:
    """PCI addresses of display controllers of vendors we know."""
    base = os.path.join(root, "sys", "bus", "pci", "devices")
    found = []
    for address in _names(base):
        vendor, kind = (_word(os.path.join(base, address, name)) for name in ("vendor", "class"))
        if vendor in {NVIDIA_PCI, AMD_PCI} and kind.startswith(_DISPLAY_CLASS):
            found.append(address)
    return found


def _word(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""

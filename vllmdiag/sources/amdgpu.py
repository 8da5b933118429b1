"""AMD devices, from the files of the amdgpu driver in /sys: no library, no tool, no right beyond reading."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import time
from collections.abc import Callable

from vllmdiag.model.gpu import Accelerator, Driver, Reading, Trouble

from . import deadline as late
from . import procfs

_CARD = re.compile(r"card\d+")
_FILES = {
    "busy": "gpu_busy_percent",
    "memory_busy": "mem_busy_percent",
    "memory_used": "mem_info_vram_used",
    "memory_total": "mem_info_vram_total",
    "power": "hwmon/hwmon*/power1_average",
    "power_now": "hwmon/hwmon*/power1_input",
    "power_limit": "hwmon/hwmon*/power1_cap",
    "temperature": "hwmon/hwmon*/temp1_input",
    "slowdown": "hwmon/hwmon*/temp1_crit",
    "clock": "hwmon/hwmon*/freq1_input",
    "ecc": "ras/umc_err_count",
    "name": "product_name",
    "uuid": "unique_id",
    "pcie_width": "current_link_width",
    "pcie_width_max": "max_link_width",
}
_UNCORRECTED = re.compile(r"\bue:\s*(\d+)")


def cards(root: str = "/") -> list[str]:
    """Directories of the devices that amdgpu drives, in the order of their PCI address."""
    base = os.path.join(root, "sys", "class", "drm")
    try:
        names = [name for name in os.listdir(base) if _CARD.fullmatch(name)]
    except OSError:
        return []
    devices = {os.path.realpath(os.path.join(base, name, "device")) for name in names}
    return sorted(device for device in devices if os.path.exists(os.path.join(device, "mem_info_vram_total")))


class AmdGpu:
    """A `Probe` on the devices of amdgpu.

    Args:
        clock: seconds since the start of the window.
        root: where ``sys`` is.
    """

    def __init__(self, clock: Callable[[], float], root: str = "/") -> None:
        self._clock, self._root = clock, root
        self._readings: dict[str, list[tuple[float, dict[str, str]]]] = {card: [] for card in cards(root)}
        self._late: set[str] = set()
        self._took_s = 0.0

    def read(self, deadline: float) -> None:
        """Read every card once more; one that did not answer is not read again."""
        start = time.monotonic()
        todo = [card for card in self._readings if card not in self._late]
        patience = max(0.1, deadline - start)
        for card, answer in zip(todo, late.each(_texts, todo, timeout_s=patience, total_s=patience), strict=True):
            if isinstance(answer, OSError):
                self._late.add(card)
            else:
                self._readings[card].append((self._clock(), json.loads(answer)))
        self._took_s += time.monotonic() - start

    def result(self) -> tuple[Driver, tuple[Accelerator, ...]]:
        """The devices."""
        stuck = [os.path.basename(card) for card in self._readings if card in self._late]
        try:
            version = procfs.text(os.path.join(self._root, "sys/module/amdgpu/version")).strip()
        except OSError:  # the one in the kernel tree has no version of its own
            version = ""
        driver = Driver(
            vendor="amd",
            version=version,
            problem="hangs" if stuck else "",
            text=f"the files of {', '.join(stuck)} in /sys cannot be read in time: the driver hangs" if stuck else "",
            next="dmesg -T | grep -i amdgpu" if stuck else "",
            took_s=round(self._took_s, 3),
        )
        return driver, tuple(self._accelerator(i, card) for i, card in enumerate(self._readings))

    def close(self) -> None:
        """Nothing stays open."""

    def _accelerator(self, index: int, card: str) -> Accelerator:
        seen = self._readings[card]
        last = seen[-1][1] if seen else {}
        broken = _UNCORRECTED.search(last.get("ecc", ""))
        hangs = Trouble(code="hangs", text="its files in /sys cannot be read: the driver hangs", critical=True)
        return Accelerator(
            vendor="amd",
            index=index,
            name=last.get("name", "") or "AMD GPU",
            uuid=last.get("uuid", ""),
            pci=os.path.basename(card),
            readings=tuple(_reading(t, texts) for t, texts in seen),
            ecc_uncorrected=int(broken[1]) if broken else None,
            troubles=(hangs,) if card in self._late else (),
        )


def _texts(card: str) -> bytes:
    found = {}
    for name, pattern in _FILES.items():
        for path in sorted(glob.glob(os.path.join(card, pattern)))[:1]:
            with contextlib.suppress(OSError):  # not offered by this device, or only to root
                found[name] = procfs.text(path).strip()
    return json.dumps(found).encode()


def _reading(t: float, texts: dict[str, str]) -> Reading:
    def number(*names: str) -> int | None:
        return next((int(texts[name]) for name in names if texts.get(name, "").isdigit()), None)

    def scaled(by: int, *names: str) -> int | None:
        value = number(*names)
        return None if value is None else value // by

    def watts(*names: str) -> float | None:
        value = number(*names)
        return None if value is None else value / 1e6

    return Reading(
        t=round(t, 3),
        busy_pct=number("busy"),
        memory_busy_pct=number("memory_busy"),
        power_w=watts("power", "power_now"),
        power_limit_w=watts("power_limit"),
        temperature_c=scaled(1000, "temperature"),
        slowdown_c=scaled(1000, "slowdown"),
        clock_mhz=scaled(1_000_000, "clock"),
        memory_used=number("memory_used"),
        memory_total=number("memory_total"),
        pcie_width=number("pcie_width"),
        pcie_width_max=number("pcie_width_max"),
    )

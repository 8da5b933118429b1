"""GPUs in the making: what several pasted pieces say of one device comes together by its machine and index, or address.

`nvidia-smi` as a table, its CSV, a listing of PCI bridges: each tells a part of a device. What is said of a machine as
a whole (the type of its IOMMU groups) belongs to each device of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllmdiag.model.gpu import Accelerator, Bridge, DeviceProcess, Driver, Peer, RdmaPort, Reading, Trouble
from vllmdiag.sources.nvml import short_pci

_KNOWN = 1 << 16
"""Devices of which only the address is known get indices from here on, in order of their addresses."""


@dataclass
class DeviceDraft:
    """What was said of one device so far."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Of `Accelerator`."""
    readings: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Look -> fields of `Reading`."""
    troubles: dict[str, Trouble] = field(default_factory=dict)
    peers: dict[int, dict[str, str]] = field(default_factory=dict)
    """Index of the other device -> fields of `Peer`."""

    def say(self, **fields: Any) -> None:
        """Facts of the device; None says nothing."""
        self.fields.update({name: value for name, value in fields.items() if value is not None})

    def reading(self, look: int, **fields: Any) -> None:
        """Facts of one look; None says nothing."""
        told = {name: value for name, value in fields.items() if value is not None}
        if told:
            self.readings.setdefault(look, {}).update(told)

    def trouble(self, code: str, text: str, critical: bool = True) -> None:
        """Something that the driver says against it."""
        self.troubles.setdefault(code, Trouble(code=code, text=text, critical=critical))


class GpuDraft:
    """Devices, drivers, and what surrounds them."""

    def __init__(self) -> None:
        self._devices: dict[tuple[str, int], DeviceDraft] = {}
        self._addresses: dict[tuple[str, str], DeviceDraft] = {}
        """Devices of which only the address is known so far."""
        self._iommu: dict[str, dict[str, str]] = {}
        """Node -> IOMMU group -> type."""
        self._groups: dict[str, dict[str, str]] = {}
        """Node -> address -> IOMMU group."""
        self.bridges: dict[str, list[tuple[str, Bridge, tuple[str, ...]]]] = {}
        """Node -> (address, bridge, addresses of the devices below it; none: of every one)."""
        self.drivers: dict[str, dict[str, Any]] = {}
        """Vendor -> fields of `Driver`."""
        self.rdma: list[RdmaPort] = []
        self._users: list[tuple[str, int | None, str, DeviceProcess]] = []
        """(node, index of the device, its address, who uses it), each of the two as far as it was told."""

    @property
    def told(self) -> bool:
        """Anything was said."""
        said = (self._devices, self._addresses, self._iommu, self.bridges, self.drivers, self.rdma, self._users)
        return any(said)

    def device(self, node: str, index: int | None, pci: str = "") -> DeviceDraft:
        """The device with that index on that machine, or at that address."""
        address = short_pci(pci.removeprefix("GPU")) if pci else ""
        if index is None:
            known = (d for (where, _), d in self._devices.items() if where == node)
            found = next((d for d in known if d.fields.get("pci") == address), None)
            found = found or self._addresses.setdefault((node, address), DeviceDraft())
        else:
            found = self._addresses.pop((node, address), None) if address else None
            found = self._devices.setdefault((node, index), found or DeviceDraft())
        if address:
            found.fields["pci"] = address
        return found

    def user(self, node: str, index: int | None, pci: str, process: DeviceProcess) -> None:
        """A process that uses the device with that index or at that address; neither: of the only one there is."""
        self._users.append((node, index, short_pci(pci) if pci else "", process))

    def iommu(self, node: str, group: str, kind: str) -> None:
        """The type of an IOMMU group."""
        self._iommu.setdefault(node, {})[group] = kind

    def in_group(self, node: str, group: str, pci: str) -> None:
        """A device is in an IOMMU group."""
        self._groups.setdefault(node, {})[short_pci(pci)] = group

    def driver(self, vendor: str, **fields: str) -> None:
        """Facts of a driver; an empty one says nothing."""
        self.drivers.setdefault(vendor, {}).update({name: value for name, value in fields.items() if value})

    def lists(self, apart_s: float) -> dict[str, tuple[Any, ...]]:
        """Fields of the snapshot; those of which nothing was said are left out."""
        self._join_users()
        found: dict[str, tuple[Any, ...]] = {
            "accelerators": tuple(self._accelerators(apart_s)),
            "drivers": tuple(Driver(vendor=vendor, **fields) for vendor, fields in self.drivers.items()),
            "rdma": tuple(self.rdma),
        }
        return {name: values for name, values in found.items() if values}

    def _join_users(self) -> None:
        """Give the users to their devices, once. nvidia-smi numbers devices in the order of their addresses."""
        everyone, self._users = self._users, []
        for node in dict.fromkeys(node for node, *_ in everyone):
            users = [(index, pci, process) for where, index, pci, process in everyone if where == node]
            own = [d for (where, _), d in sorted(self._devices.items()) if where == node]
            unnamed = [d for d in own if "pci" not in d.fields]
            addresses = sorted({pci for _, pci, _ in users if pci})
            if own and len(unnamed) == len(own) == len(addresses):
                for device, pci in zip(own, addresses, strict=True):
                    device.fields["pci"] = pci
            for index, pci, process in users:
                if index is not None or pci:
                    device = self.device(node, index, pci)
                elif len(own) == 1:
                    device = own[0]
                else:
                    continue  # which of them is not told
                device.fields["processes"] = (*device.fields.get("processes", ()), process)

    def _accelerators(self, apart_s: float) -> list[Accelerator]:
        lone = sorted(self._addresses.items(), key=lambda item: item[0])
        own = [key for key in self._devices if key[1] < _KNOWN]
        first = 0 if not own else _KNOWN
        everyone = {**self._devices, **{(node, first + n): d for n, ((node, _), d) in enumerate(lone)}}
        return [self._accelerator(node, index, d, apart_s) for (node, index), d in sorted(everyone.items())]

    def _accelerator(self, node: str, index: int, device: DeviceDraft, apart_s: float) -> Accelerator:
        pci = device.fields.get("pci", "")
        readings = [Reading(t=look * apart_s, **fields) for look, fields in sorted(device.readings.items())]
        above = [bridge for _, bridge, below in self.bridges.get(node, ()) if not below or pci in below]
        return Accelerator(
            **{
                "vendor": "nvidia",
                "iommu": self._kind(node, pci),
                **device.fields,
                "index": index,
                "node": node,
                "readings": tuple(readings),
                "troubles": tuple(device.troubles.values()),
                "peers": tuple(Peer(index=other, **told) for other, told in sorted(device.peers.items())),
                "bridges": tuple(above) if self.bridges.get(node) else None,
            }
        )

    def _kind(self, node: str, pci: str) -> str:
        """Of its own group where that is told; else the one type that all groups have."""
        kinds = self._iommu.get(node, {})
        own = kinds.get(self._groups.get(node, {}).get(pci, ""), "")
        return own or (next(iter(kinds.values())) if len(set(kinds.values())) == 1 else "")

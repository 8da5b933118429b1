"""What joins the GPUs of this machine, from sysfs: bridges with their ACS, IOMMU groups, RDMA ports, the fabric.

Only files are read, in a child with a deadline: the configuration space of a card that is dying may answer late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import msgspec

from vllmdiag.model.gpu import Accelerator, Bridge, RdmaPort

from . import deadline, procfs

_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_STATE = re.compile(r"\d+: (\w+)")
_EXTENDED = 0x100
_ACS = 0x000D
_REDIRECTS = 0x000C  # PCI_ACS_RR | PCI_ACS_CR
_MOST_CAPABILITIES = 64
_DEADLINE_S = 1.0
_MANAGER = "nv-fabricmanage"  # 15 characters of nv-fabricmanager


class _Path(msgspec.Struct):
    iommu: str = ""
    bridges: tuple[Bridge, ...] | None = None


class _Found(msgspec.Struct):
    paths: dict[str, _Path] = {}
    rdma: tuple[RdmaPort, ...] = ()
    fabric_manager: str = ""


class Surroundings(msgspec.Struct, frozen=True):
    """The devices with what stands above them, and what belongs to the machine."""

    devices: tuple[Accelerator, ...]
    rdma: tuple[RdmaPort, ...] = ()
    fabric_manager: str = ""
    """``running`` or ``not running`` on a machine with NVSwitches; empty on one without, or where it is not known."""


def surroundings(devices: Sequence[Accelerator], root: str = "/") -> Surroundings:
    """Look at the paths of these devices. Never raises: what could not be read stays unknown.

    Args:
        devices: with their PCI addresses; one without is left as it is.
        root: where the tree with ``sys``, ``proc`` and ``dev`` is.
    """
    addresses = {d.index: d.pci for d in devices if d.pci}
    try:
        answer = deadline.call(partial(_look, addresses, root), timeout_s=_DEADLINE_S)
        found = msgspec.json.decode(answer, type=_Found)
    except (OSError, msgspec.MsgspecError):
        return Surroundings(devices=tuple(devices))
    return Surroundings(
        devices=tuple(_with_path(d, found.paths.get(d.pci)) for d in devices),
        rdma=found.rdma,
        fabric_manager=found.fabric_manager,
    )


def _with_path(device: Accelerator, path: _Path | None) -> Accelerator:
    if path is None:
        return device
    return msgspec.structs.replace(device, iommu=path.iommu, bridges=path.bridges)


def _look(addresses: dict[int, str], root: str) -> bytes:
    above = {index: _above(pci, root) for index, pci in addresses.items()}
    found = _Found(
        paths={pci: _Path(iommu=_iommu(pci, root), bridges=_bridges(above[i], root)) for i, pci in addresses.items()},
        rdma=tuple(_rdma(above, root)),
        fabric_manager=_fabric_manager(root),
    )
    return msgspec.json.encode(found)


def _sys(root: str, *parts: str) -> str:
    return os.path.join(root, "sys", *parts)


def _above(pci: str, root: str) -> tuple[str, ...] | None:
    """Addresses of the bridges between the root complex and a device, the nearest last; None where it is not there."""
    try:
        target = os.readlink(_sys(root, "bus", "pci", "devices", pci))
    except OSError:
        return None
    parts = [part for part in target.split("/") if _ADDRESS.fullmatch(part)]
    return tuple(parts[:-1])


def _bridges(above: tuple[str, ...] | None, root: str) -> tuple[Bridge, ...] | None:
    if above is None:
        return None
    return tuple(Bridge(pci=pci, redirects=redirects(_configuration(pci, root))) for pci in above)


def _configuration(pci: str, root: str) -> bytes:
    try:
        return procfs.read(_sys(root, "bus", "pci", "devices", pci, "config"))
    except OSError:
        return b""


def redirects(configuration: bytes) -> bool | None:
    """Whether a bridge sends transfers between peers up to the root, by its configuration space.

    Returns:
        None where the extended part, which only root is shown, is not there; False for a bridge without ACS.
    """
    if len(configuration) <= _EXTENDED:
        return None
    at = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        if at < _EXTENDED or at + 8 > len(configuration):
            break
        header = int.from_bytes(configuration[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(configuration[at + 6 : at + 8], "little")
            return bool(control & _REDIRECTS)
        at = header >> 20
    return False


def _iommu(pci: str, root: str) -> str:
    try:
        group = os.readlink(_sys(root, "bus", "pci", "devices", pci, "iommu_group")).rpartition("/")[2]
        return procfs.text(_sys(root, "kernel", "iommu_groups", group, "type")).strip()
    except OSError:
        return ""


def _rdma(above: dict[int, tuple[str, ...] | None], root: str) -> list[RdmaPort]:
    """Each port with its state, and the devices that have no card nearer to them."""
    base = _sys(root, "class", "infiniband")
    cards = {name: _card_path(os.path.join(base, name)) for name in _list(base)}
    nearest = {index: _nearest(path, cards) for index, path in above.items() if path is not None}
    found = []
    for name in cards:
        for port in _list(os.path.join(base, name, "ports")):
            try:
                state = _STATE.match(procfs.text(os.path.join(base, name, "ports", port, "state")))
            except OSError:
                continue
            devices = tuple(index for index, names in sorted(nearest.items()) if name in names)
            found.append(RdmaPort(device=name, port=int(port), state=state[1] if state else "", devices=devices))
    return found


def _card_path(link: str) -> tuple[str, ...]:
    try:
        target = os.readlink(os.path.join(link, "device")) if os.path.islink(os.path.join(link, "device")) else ""
        target = os.path.realpath(os.path.join(link, "device")) if target else os.path.realpath(link)
    except OSError:
        return ()
    return tuple(part for part in target.split("/") if _ADDRESS.fullmatch(part))


def _nearest(path: Sequence[str], cards: dict[str, tuple[str, ...]]) -> set[str]:
    """Cards that share the longest way from the root with a device; none where nothing is shared."""
    shared = {
        name: len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))))
        for name, other in cards.items()
    }
    longest = max(shared.values(), default=0)
    return {name for name, n in shared.items() if n == longest and longest > 0}


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _comm(pid: int, root: str) -> str:
    try:
        return procfs.text(procfs.proc(root, pid, "comm")).strip()
    except OSError:
        return ""


def _fabric_manager(root: str) -> str:
    switches = _list(os.path.join(root, "proc", "driver", "nvidia-nvswitch", "devices"))
    switches = switches or [n for n in _list(os.path.join(root, "dev")) if re.fullmatch(r"nvidia-nvswitch\d+", n)]
    if not switches:
        return ""
    if any(_comm(pid, root) == _MANAGER for pid in procfs.pids(root)):
        return "running"
    # In a container the processes of the host are not to be seen: then nothing is known.
    return "not running" if os.path.exists(procfs.proc(root, 2, "stat")) else ""

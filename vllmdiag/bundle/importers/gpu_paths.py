"""What joins GPUs, as text: topology, PCI bridges and their ACS, IOMMU groups, the NVSwitch fabric, RDMA ports."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft
from vllmdiag.model.gpu import Bridge, KernelImage, RdmaPort
from vllmdiag.sources.nvml import short_pci

from .format import Context, block

# -- nvidia-smi topo --------------------------------------------------------------------------------------------------

_HEAD = re.compile(r"^\s*(?:GPU\d+)(?:\s+(?:GPU|NIC)\d+|\s+mlx5_\d+|\s+CPU Affinity|\s+NUMA.*)*\s*$")
_ROW = re.compile(r"^\s*GPU(?P<index>\d+)\s+(?P<cells>\S.*)$")
_P2P = {"OK": "ok", "CNS": "chipset not supported", "GNS": "GPU not supported", "TNS": "topology not supported",
        "NS": "not supported", "DR": "disabled by a setting of the driver", "U": "unknown"}  # fmt: skip
_ROWS = re.compile(
    r"^\s*(?:GPU\d+\s|NIC\d+[\s:]|mlx5_\d+\s|(?:NIC )?Legend|$"
    r"|(?:X|SYS|NODE|PHB|PXB|PIX|NV#|OK|CNS|GNS|TNS|NS|DR|U)\s+=)"
)
_LEVELS = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def _opens_topology(line: str, _context: Context) -> bool:
    return _HEAD.match(line) is not None and "GPU0" in line


def _goes_on_topology(line: str, _context: Context) -> bool:
    return _ROWS.match(line) is not None


def _read_topology(lines: Sequence[str], context: Context, draft: Draft) -> None:
    columns = [int(word[3:]) for word in lines[0].split() if re.fullmatch(r"GPU\d+", word)]
    for line in lines[1:]:
        row = _ROW.match(line)
        if row is None:
            continue
        device = draft.gpu.device(context.node, int(row["index"]))
        for other, cell in zip(columns, row["cells"].split(), strict=False):
            if other == int(row["index"]) or cell == "X":
                continue
            if cell in _P2P:
                device.peers.setdefault(other, {})["p2p"] = _P2P[cell]
            elif _LEVELS.fullmatch(cell):
                device.peers.setdefault(other, {})["path"] = cell


# -- lspci ------------------------------------------------------------------------------------------------------------

_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_ACS = re.compile(r"ACSCtl:\s*(?P<bits>\S.*)$")
_DEVICE = re.compile(rf"^\s*(?P<pci>{_ADDRESS})\s+(?P<rest>\S.*)$")
_BUSES = re.compile(r"Bus: primary=\w+, secondary=(?P<first>[0-9a-f]{2}), subordinate=(?P<last>[0-9a-f]{2})")
_IS_GPU = re.compile(r"\bGPU\s*(?P<index>\d+)?\b|(?:3D|VGA compatible) controller|NVIDIA")
_DENIED = re.compile(r"access denied|not readable|permission denied", re.IGNORECASE)


def _opens_pci(line: str, _context: Context) -> bool:
    device = _DEVICE.match(line)
    return device is not None and re.search(r"ACSCtl|PCI bridge|3D controller|VGA compatible", line) is not None


def _goes_on_pci(line: str, _context: Context) -> bool:
    return _DEVICE.match(line) is not None or line.startswith((" ", "\t")) or not line.strip()


def _read_pci(lines: Sequence[str], context: Context, draft: Draft) -> None:
    """Bridges with the devices below them: by the buses they lead to, else by the order of a listing from the root."""
    bridges: list[tuple[str, bool | None, tuple[int, int] | None]] = []
    gpus: list[str] = []
    below: dict[str, list[str]] = {}
    path: list[tuple[int, str]] = []
    current = ""
    for line in lines:
        device = _DEVICE.match(line)
        if device is not None:
            current = short_pci(device["pci"] if device["pci"].count(":") == 2 else f"0000:{device['pci']}")
            indent = len(line) - len(line.lstrip())
            path = [(at, pci) for at, pci in path if at < indent]
            if "ACSCtl" not in line and "bridge" not in line and (found := _IS_GPU.search(device["rest"])):
                gpus.append(current)
                draft.gpu.device(context.node, int(found["index"]) if found["index"] else None, current)
                for _, pci in path:
                    below.setdefault(pci, []).append(current)
                continue
            path.append((indent, current))
            bridges.append((current, None, None))
        if not bridges or bridges[-1][0] != current:
            continue
        pci, redirects, buses = bridges[-1]
        if found := _ACS.search(line):
            redirects = "ReqRedir+" in found["bits"] or "CmpltRedir+" in found["bits"]
        if found := _BUSES.search(line):
            buses = int(found["first"], 16), int(found["last"], 16)
        bridges[-1] = pci, redirects, buses
    denied = any(_DENIED.search(line) for line in lines)
    for pci, redirects, buses in bridges:
        reached = below.get(pci) or [g for g in gpus if buses and buses[0] <= int(g.split(":")[1], 16) <= buses[1]]
        if gpus and not reached:
            continue  # of other devices
        known = redirects if redirects is not None or denied else False
        one = Bridge(pci=pci, redirects=known)
        draft.gpu.bridges.setdefault(context.node, []).append((pci, one, tuple(reached)))


# -- IOMMU groups -----------------------------------------------------------------------------------------------------

_TYPE = re.compile(r"iommu_groups/(?P<group>\d+)/type[:\s]+(?P<kind>[\w-]+)")
_IN = re.compile(rf"iommu_groups/(?P<group>\d+)/devices/(?P<pci>{_ADDRESS})")


def _read_iommu(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        if found := _TYPE.search(line):
            draft.gpu.iommu(context.node, found["group"], found["kind"])
        elif found := _IN.search(line):
            draft.gpu.in_group(context.node, found["group"], found["pci"])


# -- the NVSwitch fabric ----------------------------------------------------------------------------------------------

_ACTIVE = re.compile(
    r"^\s*Active:\s*(?P<state>\w+)(?: \([\w-]+\))?|^\s*(?P<bare>active|inactive|failed|activating|unknown)\s*$"
)
_FABRIC = re.compile(r"nvidia-fabricmanager|nv-fabricmanager|\bfabric ?manager\b", re.IGNORECASE)
_STATE = re.compile(
    r"(?:GPU\s*(?P<index>\d+)\D.*?)?\bfabric\b.*?(?:state)?\s*[:=]?\s*(?P<state>not started|in progress|completed)",
    re.IGNORECASE,
)
_ABSENT = re.compile(r"could not be found|not[- ]found|not installed|not running|no such", re.IGNORECASE)


def _opens_fabric(line: str, _context: Context) -> bool:
    return _FABRIC.search(line) is not None or _STATE.search(line) is not None


def _goes_on_fabric(line: str, context: Context) -> bool:
    return bool(_ACTIVE.match(line) or _opens_fabric(line, context) or re.match(r"^\s+\S", line))


def _read_fabric(lines: Sequence[str], context: Context, draft: Draft) -> None:
    for line in lines:
        if found := _STATE.search(line):
            state = found["state"].lower()
            device = draft.gpu.device(context.node, int(found["index"] or 0))
            device.say(fabric=state)
            if state != "completed":
                device.trouble("fabric", f"registration with the NVSwitch fabric {state}: see nvidia-fabricmanager")
        elif found := _ACTIVE.match(line):
            running = found["state"] == "active" or found["bare"] == "active"
            draft.gpu.driver("nvidia", fabric_manager="running" if running else "not running")
        elif _FABRIC.search(line) and _ABSENT.search(line):
            draft.gpu.driver("nvidia", fabric_manager="not running")


# -- RDMA ports -------------------------------------------------------------------------------------------------------

_NEAR = re.compile(r"^\s*GPU\s*(?P<gpu>\d+)\s+(?P<device>\w+)(?::(?P<port>\d+))?\s+(?P<state>ACTIVE|DOWN|INIT|ARMED)\b")
_LINK = re.compile(r"^\s*link (?P<device>\w+)/(?P<port>\d+) .*?\bstate (?P<state>\w+)")
_SYSFS = re.compile(r"infiniband/(?P<device>\w+)/ports/(?P<port>\d+)/state[:\s]+(?:\d+:\s*)?(?P<state>[A-Z]+)")
_CA = re.compile(r"^(?:CA '(?P<device>\w+)'|hca_id:\s*(?P<hca>\w+)|Infiniband device '(?P<ib>\w+)' port (?P<port>\d+))")
_PORT = re.compile(r"^\s*(?:Port|port:)\s*(?P<port>\d+)")
_PORT_STATE = re.compile(r"^\s*(?:State|state):\s*(?:\d+:\s*)?(?:PORT_)?(?P<state>\w+)")


def _opens_rdma(line: str, _context: Context) -> bool:
    return any(pattern.search(line) for pattern in (_NEAR, _LINK, _SYSFS, _CA))


def _goes_on_rdma(line: str, context: Context) -> bool:
    return _opens_rdma(line, context) or _PORT.match(line) is not None or re.match(r"^\s+\S+.*:", line) is not None


def _read_rdma(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    near: dict[tuple[str, int], list[int]] = {}
    states: dict[tuple[str, int], str] = {}
    device, port = "", 1
    for line in lines:
        if found := _NEAR.match(line):
            key = found["device"], int(found["port"] or 1)
            near.setdefault(key, []).append(int(found["gpu"]))
            states[key] = found["state"]
        elif found := _LINK.search(line) or _SYSFS.search(line):
            states[found["device"], int(found["port"])] = found["state"].upper()
        elif found := _CA.match(line):
            device, port = found["device"] or found["hca"] or found["ib"], int(found["port"] or 1)
        elif found := _PORT.match(line):
            port = int(found["port"])
        elif device and (found := _PORT_STATE.match(line)):
            states.setdefault((device, port), found["state"].upper())
    for (name, number), state in states.items():
        gpus = tuple(near.get((name, number), ()))
        draft.gpu.rdma.append(RdmaPort(device=name, port=number, state=state, devices=gpus))


# -- what a kernel library was built for ------------------------------------------------------------------------------

_ELF = re.compile(r"^\s*(?:ELF|PTX) file\s+\d+:\s+\S*?(?P<arch>sm_\d+[af]?)\.(?P<kind>cubin|ptx)")
_LIBRARY = re.compile(r"(?P<path>\S*_(?:moe_)?C\S*\.so)")
_ARCH = re.compile(r"\b(?:sm|compute)_\d{2,3}[af]?\b")


def _opens_archs(line: str, context: Context) -> bool:
    bare = _LIBRARY.search(context.header + " " + line) is not None and _ARCH.search(line) is not None
    return _ELF.match(line) is not None or (bare and "capability" not in line)


def _goes_on_archs(line: str, _context: Context) -> bool:
    return _ARCH.search(line) is not None and "capability" not in line


def _read_archs(lines: Sequence[str], context: Context, draft: Draft) -> None:
    library = _LIBRARY.search(" ".join((*context.headers, lines[0])))
    archs: dict[str, None] = {}
    for line in lines:
        elf = _ELF.match(line)
        for arch in [elf["arch"].replace("sm_", "compute_") if elf["kind"] == "ptx" else elf["arch"]] if elf else []:
            archs.setdefault(arch)
        for arch in _ARCH.findall(line) if elf is None else []:
            archs.setdefault(arch)
    image = KernelImage(path=library["path"] if library else "the extension", archs=tuple(archs))
    draft.subject(context).append("kernels", image)


FORMATS = (
    block("nvidia-smi topo", _opens_topology, _goes_on_topology, _read_topology, ("topo",)),
    block("PCI bridges", _opens_pci, _goes_on_pci, _read_pci, ("pci", "lspci", "acs")),
    block("IOMMU groups", r"iommu_groups/\d+/(?:type|devices)", r"iommu_groups/\d+/", _read_iommu, ("iommu",)),
    block("NVSwitch fabric", _opens_fabric, _goes_on_fabric, _read_fabric, ("fabric",)),
    block("RDMA ports", _opens_rdma, _goes_on_rdma, _read_rdma, ("rdma", "ibstat", "ibv")),
    block("kernel architectures", _opens_archs, _goes_on_archs, _read_archs, ("cuobjdump", "arch")),
)

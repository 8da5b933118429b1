"""Which process uses which device, and what the kernel log says of it.

The pids that a driver tells are those of the host: in a container they are foreign ones. So they are believed only
where this tool itself lives in the host's pid namespace, and are one way among several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllmdiag.model.base import Missing
from vllmdiag.model.gpu import Accelerator, Reading, Trouble
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.gpu import gpu

from .scene import Scene

_FILES = {"nvidia": "/dev/nvidia", "amd": "/dev/kfd"}
_MINOR = re.compile(r"/dev/nvidia(\d+)")
_XID = re.compile(
    r"Xid \(PCI:(?P<pci>[0-9a-fA-F:.]+)[^)]*\): (?P<number>\d+)(?:, pid=(?P<pid>\d+))?(?P<rest>.*)", re.IGNORECASE
)
_RECOVERED = re.compile(r"\bto (?:0x0\b|None\b)|action changed to None")
_HOST_PID_NAMESPACE = 4026531836  # include/linux/proc_ns.h: PROC_PID_INIT_INO
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Xid:
    """A fault of a GPU in the kernel log."""

    number: int
    pci: str
    """``0000:61:00``, lower case, without the function."""
    pid: int | None
    t: float | None
    """Seconds after boot."""
    text: str

    @property
    def hard(self) -> bool:
        """It speaks of the device, not of a fault that a program brought on itself."""
        return self.number not in (*gpu().program_xids, *gpu().harmless_xids)


def xids(snapshot: Snapshot) -> Iterator[Xid]:
    """Every Xid of the kernel log, oldest first; one that says that no recovery is needed any more is left out."""
    for line in snapshot.kernel_lines:
        found = _XID.search(line.text)
        if found is not None and not _RECOVERED.search(found["rest"]):
            pid = int(found["pid"]) if found["pid"] else None
            pci = found["pci"].lower().partition(".")[0]
            yield Xid(int(found["number"]), pci, pid, line.t, line.text)


def is_at(device: Accelerator, pci: str) -> bool:
    """The device has that address; the domain may be written with four digits or eight."""
    own, other = device.pci.lower().partition(".")[0], pci
    return bool(own and other) and own.lstrip("0").endswith(other.lstrip("0")) and own[-5:] == other[-5:]


def device_of(scene: Scene, process: Process) -> tuple[Accelerator | None, str]:
    """The device of a process, and how it was found; None where that cannot be told."""
    devices = _candidates(scene.snapshot, process)
    if not devices:
        return None, ""
    minors = {int(found[1]) for path in process.device_files if (found := _MINOR.fullmatch(path))}
    if len(minors) == 1:
        # A process may open every device it sees, but one that has a single one open uses that.
        own = [d for d in devices if d.minor in minors]
        if own:
            return own[0], "its open device file"
    for device, how in (
        (_by_driver(scene.snapshot, devices, process), "the driver's list of processes"),
        (_by_ras(scene.snapshot, devices, process), "NCCL"),
        (_by_rank(scene, devices, process), "its rank among the visible devices"),
    ):
        if device is not None and (not minors or device.minor is None or device.minor in minors):
            return device, how
    return None, ""


def _candidates(snapshot: Snapshot, process: Process) -> tuple[Accelerator, ...]:
    """Devices of the vendor whose device files it has open; all of them where its descriptors may not be seen."""
    here = tuple(d for d in snapshot.accelerators if not (d.node and process.node) or d.node == process.node)
    if isinstance(process.socket_inodes, Missing) or (snapshot.pasted and not process.device_files):
        return here
    vendors = {vendor for vendor, prefix in _FILES.items() if any(f.startswith(prefix) for f in process.device_files)}
    return tuple(device for device in here if device.vendor in vendors)


def _by_driver(snapshot: Snapshot, devices: Sequence[Accelerator], process: Process) -> Accelerator | None:
    if snapshot.viewer is None or snapshot.viewer.namespaces.get("pid") != _HOST_PID_NAMESPACE:
        return None
    own = [d for d in devices if any(p.pid == process.pid for p in d.processes or ())]
    return own[0] if len(own) == 1 else None


def _by_ras(snapshot: Snapshot, devices: Sequence[Accelerator], process: Process) -> Accelerator | None:
    if len(process.nspids) > 1:  # in a container NCCL counts the devices of the container
        return None
    told = {
        rank.nvml_device
        for report in snapshot.ras
        for communicator in report.communicators
        for rank in communicator.ranks
        if rank.pid == process.pid and rank.nvml_device is not None
    }
    return _at(devices, told.pop()) if len(told) == 1 else None


def _by_rank(scene: Scene, devices: Sequence[Accelerator], process: Process) -> Accelerator | None:
    if len(process.nspids) > 1:
        return None
    users = [m.pid for m in scene.workers] or [m.pid for m in scene.engines]
    if process.pid not in users:
        return None
    position = users.index(process.pid)
    visible = next((process.environ[n] for n in _VISIBLE if n in process.environ), None)
    visible = next((v for n in _VISIBLE if (v := scene.environ(n)) is not None), None) if visible is None else visible
    if len({d.index for d in devices}) < len(devices):  # of several machines, each counting its own
        return devices[position] if len(devices) == len(users) else None
    if visible is None:
        return _at(devices, position)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if position >= len(names):
        return None
    name = names[position]
    if name.isdecimal():
        return _at(devices, int(name))
    return next((d for d in devices if d.uuid and d.uuid.startswith(name)), None)


def _at(devices: Sequence[Accelerator], index: int) -> Accelerator | None:
    return next((device for device in devices if device.index == index), None)


def spinning(device: Accelerator) -> bool | None:
    """A kernel on it only waits: fully busy with no memory traffic and little power, in every reading.

    Returns:
        None where it cannot be told: no power (GB10, virtual GPUs), a partitioned device, a single reading.
    """
    if device.mig or len(device.readings) < 2:
        return None
    found = [_spins(reading) for reading in device.readings]
    if None in found and False not in found:
        return None
    return all(found)


def seems_spinning(device: Accelerator) -> bool | None:
    """The same for a server that is known to stand: one reading is enough, and the power may be unknown.

    A model that generates reads its weights all the time; full load without memory traffic is no such work.
    """
    if device.mig or not device.readings:
        return None
    rule, found = gpu().spin, []
    for reading in device.readings:
        exact = _spins(reading)
        if exact is None and reading.memory_busy_pct is not None and not (reading.power_w and reading.power_limit_w):
            exact = (reading.busy_pct or 0) >= rule.busy_pct and reading.memory_busy_pct <= rule.memory_busy_pct
        elif exact is None and reading.busy_pct is not None and reading.power_w and reading.power_limit_w:
            # the table of nvidia-smi has no memory traffic: full load at the power of a rest is no work either
            exact = reading.power_w <= rule.power_share * reading.power_limit_w
        found.append(exact)
    return None if None in found and False not in found else all(found)


def busy(device: Accelerator) -> bool | None:
    """A kernel ran all the time in every reading; None where that is not known."""
    shares = [r.busy_pct for r in device.readings if r.busy_pct is not None]
    return all(share >= gpu().spin.busy_pct for share in shares) if shares else None


def _spins(reading: Reading) -> bool | None:
    rule = gpu().spin
    if reading.busy_pct is not None and reading.busy_pct < rule.busy_pct:
        return False
    if reading.busy_pct is None or reading.memory_busy_pct is None or not reading.power_w or not reading.power_limit_w:
        return None
    quiet = reading.memory_busy_pct <= rule.memory_busy_pct
    return quiet and reading.power_w <= rule.power_share * reading.power_limit_w


def troubles(snapshot: Snapshot, device: Accelerator) -> tuple[Trouble, ...]:
    """What the driver and the kernel log say against a device."""
    return (*device.troubles, *_xids(snapshot, device), *_dropped_links(device), *_slowed_down(device))


def _xids(snapshot: Snapshot, device: Accelerator) -> Iterator[Trouble]:
    seen: dict[int, int] = {}
    for xid in xids(snapshot):
        if is_at(device, xid.pci):
            seen[xid.number] = seen.get(xid.number, 0) + 1
    for number, times in seen.items():
        words = gpu().xids.get(number, "see NVIDIA's list of Xid errors")
        often = f" ({times} times)" if times > 1 else ""
        critical = number not in gpu().harmless_xids
        yield Trouble(code=f"xid-{number}", text=f"Xid {number}{often}: {words}", critical=critical)


def _dropped_links(device: Accelerator) -> Iterator[Trouble]:
    """A link that is down among others that are up, or whose errors grew within the window."""
    links = device.readings[-1].links if device.readings else ()
    down = [link.number for link in links if not link.up]
    if down and len(down) < len(links):
        yield Trouble(code="link-down", text=f"NVLink {', '.join(map(str, down))} of {len(links)} down", critical=True)
    before = {link.number: link.errors for link in device.readings[0].links} if device.readings else {}
    grown = [link.number for link in links if (link.errors or 0) > (before.get(link.number) or 0)]
    if grown:
        yield Trouble(code="link-errors", text=f"errors of NVLink {', '.join(map(str, grown))} grow", critical=True)


def _slowed_down(device: Accelerator) -> Iterator[Trouble]:
    """In every reading something holds its clock down that is not the usual care for power."""
    usual = {throttle.text for throttle in gpu().throttle if throttle.usual}
    held = [set(reading.throttle or ()) - usual for reading in device.readings]
    always = set.intersection(*held) if held else set()
    if always:
        text = f"slowed down: {', '.join(t for t in device.readings[-1].throttle or () if t in always)}"
        yield Trouble(code="throttled", text=text)

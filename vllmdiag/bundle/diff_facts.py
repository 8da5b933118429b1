"""The facts that `diff` compares, each as a name and a text: of an instance, a process, its stack, a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllmdiag.model.base import Missing, known
from vllmdiag.model.diff import Change
from vllmdiag.model.gpu import Accelerator
from vllmdiag.model.process import Frame, Process, ThreadStack
from vllmdiag.model.snapshot import Snapshot

if TYPE_CHECKING:
    from .diff import Look


def instance_facts(look: Look) -> dict[str, str]:
    """Verdict, versions, machine, what could be seen."""
    snapshot, seen = look.snapshot, look.view
    verdict = look.diagnosis.verdict
    node, viewer = snapshot.node, snapshot.viewer
    facts = {
        "verdict": f"{verdict.status}: {verdict.cause}",
        "first blocker": verdict.subject.label if verdict.status not in ("ok", "unknown") else "",
        "vLLM": seen.vllm_version or "",
        "model": seen.model or "",
        "port": str(seen.port or ""),
        "host": node.hostname,
        "boot": node.boot_id,
        "kernel": node.kernel,
        "processors": str(node.n_cpus or ""),
        "memory": str(node.mem_total or ""),
        "vllmdiag": snapshot.tool,
        "access": viewer.access if viewer is not None else "",
    }
    facts |= {f"/dev/shm size ({mount.path})": str(mount.size) for mount in snapshot.shm_mounts}
    facts |= {f"layer {layer.layer} {layer.name}": layer.status for layer in look.diagnosis.layers}
    facts |= {f"driver of {driver.vendor}": _joined(driver.version, driver.problem) for driver in snapshot.drivers}
    for probe in snapshot.http:
        facts[f"GET {probe.path}"] = str(probe.status) if probe.status is not None else probe.error
    facts |= {f"not seen: {hole.what}": hole.why for hole in look.diagnosis.missing if "pid" not in hole.what}
    return facts


def process_facts(process: Process) -> dict[str, str]:
    """What a process was started with and what limits it."""
    words = () if isinstance(process.cmdline, Missing) else process.cmdline
    facts = {
        "command line": " ".join(words),
        "executable": known(process.exe) or "",
        "user": "" if process.uid is None else str(process.uid),
        "traced by": str(process.tracer_pid or ""),
        "sleeps in": process.wchan,
        "threads": str(len(process.threads) or ""),
        "devices": ", ".join(process.device_files),
    }
    facts |= {f"library {_library(path)}": path for path in process.libraries}
    facts |= {f"variable {name}": value for name, value in process.environ.items()}
    facts |= _figures("limit", known(process.limits), ())
    facts |= _figures("control group", known(process.cgroup), _MOVING)
    return facts


_MOVING = ("memory_current", "shmem", "pids_current", "nr_throttled", "throttled_s")
"""Figures of a control group that always move."""


def stack_change(old: Process, new: Process) -> Change | None:
    """The innermost frames of the two main threads, where the stacks differ in a function. Lines alone do not count."""
    a, b = _main(old), _main(new)
    if a is None or b is None:
        return None
    paths = [[(frame.name, frame.file) for frame in reversed(stack.frames)] for stack in (a, b)]
    if paths[0] == paths[1]:
        return None
    shared = 0
    while shared < min(map(len, paths)) and paths[0][shared] == paths[1][shared]:
        shared += 1
    common = a.frames[len(a.frames) - shared] if shared else None
    detail = f"both in {_place(common)}" if common is not None else "nothing in common"
    return Change(what="stack", before=_innermost(a.frames), after=_innermost(b.frames), detail=detail)


def device_facts(snapshot: Snapshot) -> dict[str, Mapping[str, str]]:
    """Of each device, by vendor and index."""
    return {f"{device.vendor} {device.index}": _device(device) for device in snapshot.accelerators}


def _device(device: Accelerator) -> dict[str, str]:
    last = device.readings[-1] if device.readings else None
    return {
        "name": device.name,
        "uuid": device.uuid,
        "pci": device.pci,
        "troubles": "; ".join(sorted(trouble.text for trouble in device.troubles)),
        "uncorrected memory errors": _text(device.ecc_uncorrected),
        "remapped rows": _text(device.rows_remapped),
        "fabric": device.fabric,
        "partitioned": _text(device.mig),
        "processes": ", ".join(str(p.pid) for p in device.processes or ()),
        "throttled by": ", ".join(last.throttle or ()) if last is not None else "",
        "pcie width": _text(last.pcie_width) if last is not None else "",
        "links up": str(sum(link.up for link in last.links)) if last is not None and last.links else "",
    }


def _main(process: Process) -> ThreadStack | None:
    """The main thread of the last dump that could be had."""
    for dump in reversed(process.stacks):
        if not isinstance(dump.threads, Missing):
            mains = [t for t in dump.threads if t.tid == process.pid] or [t for t in dump.threads if t.frames]
            return mains[0] if mains else None
    return None


def _innermost(frames: Sequence[Frame]) -> str:
    return _place(frames[0]) if frames else "no Python frame"


def _place(frame: Frame) -> str:
    return f"{frame.name} ({frame.file}:{frame.line})"


def _figures(what: str, struct: msgspec.Struct | None, without: Sequence[str]) -> dict[str, str]:
    if struct is None:
        return {}
    return {
        f"{what} {name}": "none" if value is None else str(value)
        for name, value in msgspec.structs.asdict(struct).items()
        if name not in without
    }


def _library(path: str) -> str:
    """``libzmq`` of ``/x/pyzmq.libs/libzmq-a4c1e1e4.so.5.2.5``."""
    name = path.rsplit("/", 1)[-1]
    return name.split(".so", 1)[0].split("-", 1)[0]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)

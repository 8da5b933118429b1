"""The program that talks to NVML, run as a child that may be killed: a call into a stuck driver never returns.

It writes one JSON line before each call and one after it, so that whoever started it knows which call hangs:
``["call", device, name]``, then ``["value", device, name, value]`` or ``["error", device, name, number, text]``. After
all devices were asked it writes ``["end", round]`` and asks them again for each line it reads; it ends with its input.
The numbers are NVML's own (nvml.h). It imports nothing of vllmdiag: it must start fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

_LOST = 15
_NO_LIBRARY_FOR_PYTHON = -1
_BAD_BINDING = -2
_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_GONE = object()
_SM, _TEMPERATURE_CORE, _SLOWDOWN, _UNCORRECTED, _VOLATILE, _RECOVERY_FIELD = 1, 0, 1, 1, 0, 230

Calls = tuple[tuple[str, Callable[[Any, Any], object]], ...]


def _pci(nvml: Any, device: Any) -> object:
    return _text(nvml.nvmlDeviceGetPciInfo(device).busId)


def _memory(nvml: Any, device: Any) -> object:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return [memory.used, memory.total]


def _busy(nvml: Any, device: Any) -> object:
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    return [rates.gpu, rates.memory]


def _throttle(nvml: Any, device: Any) -> object:
    # The call was renamed with driver 535; older libraries have only the old name.
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
    except nvml.NVMLError_FunctionNotFound:
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)


def _processes(nvml: Any, device: Any) -> object:
    return [[p.pid, p.usedGpuMemory] for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)]


def _recovery(nvml: Any, device: Any) -> object:
    (field,) = nvml.nvmlDeviceGetFieldValues(device, [_RECOVERY_FIELD])
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return field.value.uiVal


def _fabric(nvml: Any, device: Any) -> object:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(device, byref(info))
    return [info.state, info.status]


def _capability(nvml: Any, device: Any) -> object:
    return list(nvml.nvmlDeviceGetCudaComputeCapability(device))


def _p2p(nvml: Any, device: Any) -> object:
    """Index, level of the path and status of reads, for each other device."""
    found = []
    for other in range(nvml.nvmlDeviceGetCount()):
        peer = nvml.nvmlDeviceGetHandleByIndex(other)
        if nvml.nvmlDeviceGetIndex(device) != other:
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(device, peer)
            # The binding's constant for reads is a tuple by mistake: its number is 0.
            found.append([other, level, nvml.nvmlDeviceGetP2PStatus(device, peer, 0)])
    return found


def _links(nvml: Any, device: Any) -> object:
    """Number, up, errors of each link; a GPU with fewer than the most says so at the first that is too many."""
    found: list[list[object]] = []
    for number in range(_LINKS):
        try:
            up = bool(nvml.nvmlDeviceGetNvLinkState(device, number))
        except nvml.NVMLError:
            if not found:
                raise
            break
        try:
            errors = sum(nvml.nvmlDeviceGetNvLinkErrorCounter(device, number, kind) for kind in range(4))
        except nvml.NVMLError:
            errors = None
        found.append([number, up, errors])
    return found


ONCE: Calls = (
    ("name", lambda nvml, device: _text(nvml.nvmlDeviceGetName(device))),
    ("uuid", lambda nvml, device: _text(nvml.nvmlDeviceGetUUID(device))),
    ("pci", _pci),
    ("minor", lambda nvml, device: nvml.nvmlDeviceGetMinorNumber(device)),
    ("mig", lambda nvml, device: nvml.nvmlDeviceGetMigMode(device)[0]),
    ("clock_max", lambda nvml, device: nvml.nvmlDeviceGetMaxClockInfo(device, _SM)),
    ("power_limit", lambda nvml, device: nvml.nvmlDeviceGetEnforcedPowerLimit(device)),
    ("slowdown", lambda nvml, device: nvml.nvmlDeviceGetTemperatureThreshold(device, _SLOWDOWN)),
    ("pcie_width_max", lambda nvml, device: nvml.nvmlDeviceGetMaxPcieLinkWidth(device)),
    ("processes", _processes),
    ("ecc", lambda nvml, device: nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _VOLATILE)),
    ("remapped", lambda nvml, device: nvml.nvmlDeviceGetRemappedRows(device)),
    ("recovery", _recovery),
    ("fabric", _fabric),
    ("capability", _capability),
    ("p2p", _p2p),
)
EACH_TIME: Calls = (
    ("busy", _busy),
    ("power", lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device)),
    ("memory", _memory),
    ("temperature", lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, _TEMPERATURE_CORE)),
    ("clock", lambda nvml, device: nvml.nvmlDeviceGetClockInfo(device, _SM)),
    ("throttle", _throttle),
    ("pcie_generation", lambda nvml, device: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device)),
    ("pcie_width", lambda nvml, device: nvml.nvmlDeviceGetCurrPcieLinkWidth(device)),
    ("pcie_replays", lambda nvml, device: nvml.nvmlDeviceGetPcieReplayCounter(device)),
    ("links", _links),
)


def main() -> None:
    """Ask everything once, and what moves again for each line of input."""
    nvml = _ask(None, "import", _import)
    if nvml is None or _ask(None, "init", lambda: nvml.nvmlInit() or True) is None:
        return
    _ask(None, "driver", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    _ask(None, "cuda", nvml.nvmlSystemGetCudaDriverVersion)
    count = _ask(None, "count", nvml.nvmlDeviceGetCount) or 0
    devices = {i: _ask(i, "handle", partial(nvml.nvmlDeviceGetHandleByIndex, i)) for i in range(count)}
    devices = {i: device for i, device in devices.items() if device is not None}
    lost = _round(nvml, devices, ONCE + EACH_TIME)
    number = 0
    _say("end", number)
    for _ in sys.stdin:
        number += 1
        devices = {i: device for i, device in devices.items() if i not in lost}
        lost = _round(nvml, devices, EACH_TIME)
        _say("end", number)


def _round(nvml: Any, devices: dict[int, Any], calls: Calls) -> set[int]:
    """Ask the devices; returns those that are lost. They are not asked on: each call may take seconds then."""
    lost = set()
    for index, device in devices.items():
        for name, call in calls:
            if _ask(index, name, partial(call, nvml, device)) is _GONE:
                lost.add(index)
                break
    return lost


def _ask(device: int | None, name: str, call: Callable[[], Any]) -> Any:
    """The answer; None where there is none; `_GONE` where the device is lost."""
    _say("call", device, name)
    try:
        answer = call()
    except ImportError:
        _say("error", device, name, _NO_LIBRARY_FOR_PYTHON, "nvidia-ml-py is not installed")
    except Exception as error:  # noqa: BLE001  a binding that does not fit its library raises anything
        number = getattr(error, "value", _BAD_BINDING)
        _say("error", device, name, number, str(error))
        return _GONE if number == _LOST and device is not None and name != "handle" else None
    else:
        _say("value", device, name, None if name in {"import", "init", "handle"} else answer)
        return answer
    return None


def _import() -> Any:
    import pynvml  # type: ignore[import-untyped]

    return pynvml


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _say(*words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

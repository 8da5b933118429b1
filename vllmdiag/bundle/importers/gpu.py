"""GPUs as nvidia-smi shows them: its table, the answers to its queries as CSV or columns, and the long listing (-q)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from vllmdiag.bundle.draft import Draft
from vllmdiag.bundle.gpu_draft import DeviceDraft
from vllmdiag.vllm.gpu import gpu

from .format import Context, block
from .gpu_users import take_listed

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "mb": 1 << 20, "gb": 1 << 30}
_NOTHING = frozenset(["", "n/a", "[n/a]", "[not supported]", "not supported", "none", "-", "[unknown error]"])


def _number(text: str) -> float | None:
    found = _NUMBER.search(text)
    return float(found[0]) if found is not None and text.strip().lower() not in _NOTHING else None


def _whole(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _bytes(text: str) -> int | None:
    """A size with its unit; MiB where there is none, as with ``nounits``."""
    number = _number(text)
    unit = next((factor for name, factor in _UNITS.items() if text.strip().lower().endswith(name)), 1 << 20)
    return None if number is None else int(number * unit)


def _nothing(text: str) -> bool:
    return text.strip().lower() in _NOTHING


# -- one value of a device --------------------------------------------------------------------------------------------

Put = Callable[[DeviceDraft, int, str], None]


def _recovery(device: DeviceDraft, _look: int, text: str) -> None:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.strip()).lower()
    if not _nothing(text) and words != "0":
        said = gpu().recovery.get(int(words), f"recovery action {words}") if words.isdigit() else words
        device.trouble("recovery", f"the driver asks to {said}")


def _fabric(device: DeviceDraft, _look: int, text: str) -> None:
    state = text.strip().lower()
    if _nothing(text) or state in ("not supported", "disabled"):
        return
    device.say(fabric=state)
    if state in ("not started", "in progress"):
        device.trouble("fabric", f"registration with the NVSwitch fabric {state}: see nvidia-fabricmanager")


def _ecc(device: DeviceDraft, _look: int, text: str) -> None:
    count = _whole(text)
    device.say(ecc_uncorrected=count)
    if count:
        device.trouble("ecc", f"{count} uncorrected memory errors since the driver was loaded", critical=False)


def _rows(device: DeviceDraft, _look: int, text: str) -> None:
    """Four numbers: correctable, uncorrectable, pending, failed."""
    told = [int(part) for part in re.findall(r"\d+", text)]
    if len(told) == 4:
        device.say(rows_remapped=told[0] + told[1])
        _pending(device, 0, str(told[2]))
        _failed(device, 0, str(told[3]))


def _pending(device: DeviceDraft, _look: int, text: str) -> None:
    if text.strip().lower() not in ("0", "no") and not _nothing(text):
        device.trouble("rows-pending", "a row of memory waits to be remapped: the GPU must be reset", critical=False)


def _failed(device: DeviceDraft, _look: int, text: str) -> None:
    if text.strip().lower() not in ("0", "no") and not _nothing(text):
        device.trouble("rows-failed", "a row of memory could not be remapped: replace the GPU")


def _remapped(device: DeviceDraft, _look: int, text: str) -> None:
    count = _whole(text)
    if count is not None:
        device.say(rows_remapped=device.fields.get("rows_remapped", 0) + count)


def _mig(device: DeviceDraft, _look: int, text: str) -> None:
    device.say(mig={"enabled": True, "disabled": False}.get(text.strip().lower()))


def _fact(name: str, read: Callable[[str], Any] = lambda text: None if _nothing(text) else text.strip()) -> Put:
    return lambda device, _look, text: device.say(**{name: read(text)})


def _reads(name: str, read: Callable[[str], Any]) -> Put:
    return lambda device, look, text: device.reading(look, **{name: read(text)})


_COLUMNS: tuple[tuple[str, Put], ...] = (
    (r"(?:gpu_)?name", _fact("name")),
    (r"(?:gpu_)?uuid", _fact("uuid")),
    (r"utilization\.gpu|gpu_util|sm_util", _reads("busy_pct", _whole)),
    (r"utilization\.memory|mem_util", _reads("memory_busy_pct", _whole)),
    (r"power\.draw(?:\.instant|\.average)?|power", _reads("power_w", _number)),
    (r"(?:enforced\.)?power\.limit|power\.default_limit", _reads("power_limit_w", _number)),
    (r"temperature\.gpu|temp", _reads("temperature_c", _whole)),
    (r"memory\.used", _reads("memory_used", _bytes)),
    (r"memory\.total", _reads("memory_total", _bytes)),
    (r"clocks(?:\.current)?\.(?:sm|graphics|gr)", _reads("clock_mhz", _whole)),
    (r"clocks\.max\.(?:sm|graphics|gr)", _reads("clock_max_mhz", _whole)),
    (r"compute[_ ]cap(?:ability)?", _fact("capability")),
    (r"mig\.mode\.current", _mig),
    (r"ecc\.errors\.uncorrected\.volatile\.total|ecc_uncorrected(?:_volatile)?", _ecc),
    (r"remapped_rows\.pending", _pending),
    (r"remapped_rows\.failure", _failed),
    (r"remapped_rows\.(?:un)?correctable", _remapped),
    (r"remapped_rows", _rows),
    (r"(?:gpu_)?recovery_action", _recovery),
    (r"fabric\.state", _fabric),
)
_NAMES = tuple((re.compile(pattern), put) for pattern, put in _COLUMNS)
_INDEX = re.compile(r"(?:gpu[ _]?)?(?:index|idx|id)|gpu")
_NODE = re.compile(r"node|host(?:name)?|pod")
_BUS = re.compile(r"(?:gpu_)?(?:pci\.)?(?:bus|bus_id|pci\.bus_id)|pci")
_CLEAN = re.compile(r"\s*(?:\[[^\]]*\]|\([^)]*\))\s*")
_QUERY = re.compile(r"--query-gpu[= ](\S+)")


def _titles(text: str) -> list[str]:
    """Names of columns; what stands in brackets is a unit or a list of parts."""
    return [_CLEAN.sub("", part).strip().lower() for part in re.split(r",(?![^(\[]*[)\]])", text.strip().lstrip("#"))]


def _known(title: str) -> bool:
    return any(pattern.fullmatch(title) for pattern, _ in _NAMES)


def _is_title(line: str) -> bool:
    return (
        "," in line
        and "--query" not in line
        and sum(map(_known, _titles(line))) >= 1
        and not _NUMBER.match(line.strip())
    )


def _asked(context: Context) -> list[str]:
    """The columns that the command above asked for, where the answer has no title."""
    found = _QUERY.search(context.header)
    return _titles(found[1]) if found is not None else []


def _opens_csv(line: str, context: Context) -> bool:
    if _is_title(line):
        return True
    asked = _asked(context)
    return len(asked) > 1 and line.count(",") == len(asked) - 1 and not line.lstrip().startswith("#")


def _goes_on_csv(line: str, _context: Context) -> bool:
    return re.match(
        r"^\s*(?:(?:NVIDIA [\w. -]+|[\w.-]+)\s*,|\d+\s+(?:\S+:|NVIDIA ))", line
    ) is not None and not line.lstrip().startswith("#")


def _columns(words: list[str], titles: Sequence[str]) -> list[str]:
    """Cells that only blanks part. The name of a GPU has some of its own: ``0 NVIDIA GB10 12.1``."""
    extra = len(words) - len(titles)
    at = next((n for n, title in enumerate(titles) if re.fullmatch(r"(?:gpu_)?name", title)), None)
    if at is None or extra <= 0:
        return words
    return [*words[:at], " ".join(words[at : at + extra + 1]), *words[at + extra + 1 :]]


def _read_csv(lines: Sequence[str], context: Context, draft: Draft) -> None:
    titles = _titles(lines[0]) if _is_title(lines[0]) else _asked(context)
    rows = lines[1:] if _is_title(lines[0]) else lines
    seen: dict[tuple[str, int], int] = {}
    for position, line in enumerate(rows):
        commas = [cell.strip() for cell in line.split(",")]
        cells = commas if len(commas) == len(titles) else _columns(line.split(), titles)
        if len(cells) != len(titles):
            continue
        told = dict(zip(titles, cells, strict=True))
        node = next((value for name, value in told.items() if _NODE.fullmatch(name)), context.node)
        number = next((value for name, value in told.items() if _INDEX.fullmatch(name)), None)
        bus = next((value for name, value in told.items() if _BUS.fullmatch(name)), "")
        index = _whole(number) if number is not None else None if bus else position
        device = draft.gpu.device(node, index, bus)
        look = context.look
        if index is not None:  # the same device again in one answer (nvidia-smi -l) is a later look
            look = context.look + seen.get((node, index), 0)
            seen[node, index] = seen.get((node, index), 0) + 1
        for name, value in told.items():
            put = next((put for pattern, put in _NAMES if pattern.fullmatch(name)), None)
            if put is not None:
                put(device, look, value)


# -- the table --------------------------------------------------------------------------------------------------------

_TABLE = re.compile(r"NVIDIA-SMI \d")
_FIRST = re.compile(
    r"\|\s*(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?:On|Off|N/A|ERR!)\s*\|\s*(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)"
)
_SECOND = re.compile(
    r"\|\s*\S+\s+(?P<temp>\d+C|N/A|ERR!)\s+(?P<state>P\d+|N/A|ERR!)\s+(?P<power>\d+W|N/A|ERR!|Unknown Error)\s*/"
    r"\s*(?P<limit>\d+W|N/A|ERR!)\s*\|\s*(?P<used>\d+MiB|\S.*?)\s*(?:/\s*(?P<total>\d+MiB|\S+))?\s*\|"
    r"\s*(?P<busy>\d+\s*%|N/A|ERR!)"
)
_VERSIONS = re.compile(r"Driver Version:\s*(?P<driver>[\d.]+)(?:\s+CUDA Version:\s*(?P<cuda>[\d.]+))?")
_DEAD = re.compile(
    r"Unable to determine the device handle for (?:GPU\s*(?P<index>\d+)\b(?!:))?"
    r".*?(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f.]+).*?(?:GPU is lost|Unknown Error|not found)",
    re.IGNORECASE,
)


def _goes_on_table(line: str, _context: Context) -> bool:
    return not line.strip() or line.lstrip().startswith(("|", "+")) or _DEAD.search(line) is not None


def _read_table(lines: Sequence[str], context: Context, draft: Draft) -> None:
    device: DeviceDraft | None = None
    for line in lines:
        if found := _VERSIONS.search(line):
            draft.gpu.driver("nvidia", version=found["driver"], runtime=found["cuda"] or "")
        elif found := _DEAD.search(line):
            index = int(found["index"]) if found["index"] else None
            draft.gpu.device(context.node, index, found["bus"]).trouble(
                "lost", "fell off the bus, or is not answered for"
            )
        elif found := _FIRST.match(line):
            device = draft.gpu.device(context.node, int(found["index"]), found["bus"])
            device.say(name=found["name"].strip())
        elif device is not None and (found := _SECOND.match(line)):
            _second(device, context.look, found)
            device = None
        else:
            take_listed(line, context, draft)


def _second(device: DeviceDraft, look: int, found: re.Match[str]) -> None:
    if "ERR!" in (found["temp"], found["power"], found["busy"]):
        device.trouble("lost", "nvidia-smi shows ERR! for it: the driver cannot read it any more")
    device.reading(
        look,
        temperature_c=_whole(found["temp"]),
        power_w=_number(found["power"]),
        power_limit_w=_number(found["limit"]),
        memory_used=_bytes(found["used"]) if found["used"].endswith("MiB") else None,
        memory_total=_bytes(found["total"]) if found["total"] else None,
        busy_pct=_whole(found["busy"]),
    )


# -- the long listing -------------------------------------------------------------------------------------------------

_GPU = re.compile(r"^GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$")
_PAIR = re.compile(r"^(?P<indent>\s+)(?P<key>[A-Za-z][\w .()/-]*?)\s*(?::\s*(?P<value>.*))?$")
_LONG: dict[str, Put] = {
    "product name": _fact("name"),
    "gpu uuid": _fact("uuid"),
    "minor number": _fact("minor", _whole),
    "mig mode/current": _mig,
    "utilization/gpu": _reads("busy_pct", _whole),
    "utilization/memory": _reads("memory_busy_pct", _whole),
    "fb memory usage/total": _reads("memory_total", _bytes),
    "fb memory usage/used": _reads("memory_used", _bytes),
    "temperature/gpu current temp": _reads("temperature_c", _whole),
    "gpu power readings/power draw": _reads("power_w", _number),
    "gpu power readings/average power draw": _reads("power_w", _number),
    "gpu power readings/instantaneous power draw": _reads("power_w", _number),
    "gpu power readings/current power limit": _reads("power_limit_w", _number),
    "power readings/power draw": _reads("power_w", _number),
    "power readings/enforced power limit": _reads("power_limit_w", _number),
    "clocks/sm": _reads("clock_mhz", _whole),
    "max clocks/sm": _reads("clock_max_mhz", _whole),
    "volatile/dram uncorrectable": _ecc,
    "remapped rows/correctable error": _remapped,
    "remapped rows/uncorrectable error": _remapped,
    "remapped rows/pending": _pending,
    "remapped rows/remapping failure occurred": _failed,
    "gpu recovery action": _recovery,
    "fabric/state": _fabric,
}


def _goes_on_long(line: str, _context: Context) -> bool:
    heads = ("Timestamp", "Driver Version", "CUDA Version", "Attached GPUs", "==")
    return not line.strip() or line.startswith((*heads, " ", "\t")) or _GPU.match(line) is not None


def _read_long(lines: Sequence[str], context: Context, draft: Draft) -> None:
    device: DeviceDraft | None = None
    index, heading = -1, ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "Driver Version":
            draft.gpu.driver("nvidia", version=value.strip())
        elif key.strip() == "CUDA Version":
            draft.gpu.driver("nvidia", runtime=value.strip())
        if found := _GPU.match(line):
            index += 1
            # The listing is in the order of the indices, unless one device was asked for by its number.
            device, heading = draft.gpu.device(context.node, index, found["bus"]), ""
        elif device is not None and (pair := _PAIR.match(line)):
            name = pair["key"].lower()
            if pair["value"] is None:
                heading = name
                continue
            put = _LONG.get(f"{heading}/{name}") or _LONG.get(name)
            if put is not None:
                put(device, context.look, pair["value"])


_HANGS = re.compile(r"nvidia-smi.{0,60}(?:does not return|hangs|no answer|timed? ?out|never returns)", re.IGNORECASE)
_NO_DRIVER = re.compile(r"NVIDIA-SMI has failed because|Failed to initialize NVML: (?P<why>.*)")


def _read_failure(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    line = lines[0]
    if _HANGS.search(line):
        draft.gpu.driver("nvidia", problem="hangs", text=line.strip().lstrip("# "), next="dmesg -T | grep -i nvrm")
        return
    mismatch = "version mismatch" in line.lower()
    problem = "version-mismatch" if mismatch else "not-loaded"
    draft.gpu.driver("nvidia", problem=problem, text=line.strip(), next="cat /proc/driver/nvidia/version")


def _fails(line: str, _context: Context) -> bool:
    return _HANGS.search(line) is not None or _NO_DRIVER.search(line) is not None


def _never(_line: str, _context: Context) -> bool:
    return False


FORMATS = (
    block("nvidia-smi", lambda line, _: any(rule.search(line) for rule in (_TABLE, _DEAD, _FIRST)),
          _goes_on_table, _read_table, ("nvidia-smi", "nvidia_smi")),
    block("nvidia-smi -q", r"^=+\s*NVSMI LOG\s*=+", _goes_on_long, _read_long, ("nvidia-smi", "nvidia_smi")),
    block("nvidia-smi failure", _fails, _never, _read_failure),
    block("nvidia-smi query", _opens_csv, _goes_on_csv, _read_csv, ("nvidia-smi", "nvidia_smi", "nvml", "gpu")),
)  # fmt: skip

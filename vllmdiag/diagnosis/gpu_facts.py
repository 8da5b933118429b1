"""Layer 4: what is true of devices, drivers, limits and builds by itself, and what it tells of a wait at the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vllmdiag.model.diagnosis import Finding, LayerStatus, Severity, Subject
from vllmdiag.model.gpu import Accelerator, KernelImage, Trouble
from vllmdiag.model.process import Limits, Process
from vllmdiag.vllm.gpu import gpu, known_hang, runs_on, version_in_path
from vllmdiag.vllm.instances import Member
from vllmdiag.vllm.loglines import find

from .case import Case
from .collectives import lagging
from .devices import Xid, device_of, is_at, troubles, xids
from .gpu_group import Group

_FATAL = frozenset(
    ["lost", "hangs", "reset-required", "rows-failed", "xid-62", "xid-79", "xid-95", "xid-119", "xid-120"]
)
"""Troubles with which a GPU does no further work, also where nobody has asked it yet."""
_NCCL_PID = re.compile(r"^\s*\S+?:(?P<pid>\d+):\d+ \[")
"""NCCL begins its lines with host, pid and thread id."""


def fact_findings(case: Case) -> Iterator[Finding]:
    """Faults that need no stall to be one. Of a server at work they are a warning."""
    yield from _faulty_devices(case)
    yield from _while_waking(case)
    if not _calm(case):
        yield from _fabric(case)
        yield from _memlock(case)
        yield from _architecture(case)


def gpu_without_fault(case: Case) -> tuple[LayerStatus, str]:
    """What is said of the layer where nothing was found in it: what was seen, or what kept it from being seen."""
    snapshot = case.scene.snapshot
    blind = next((d for d in snapshot.drivers if d.problem), None)
    if blind is not None:
        return "unknown", f"{blind.vendor} GPUs: {blind.text}"
    words = ["by stacks: no rank is held in a collective" if case.scene.workers else "no worker process"]
    n = len(snapshot.accelerators)
    words += [f"{n} GPU{'s' if n > 1 else ''} read"] if n else []
    words += ["NCCL's counts agree"] if snapshot.ras and not lagging(snapshot) else []
    return "ok", ", ".join(words)


def _calm(case: Case) -> bool:
    """The server serves, or has nothing to do: it is known to be well."""
    if case.scene.snapshot.pasted or case.starting or not case.scene.engines:
        return False
    engines = [e for e in case.scene.engines if not case.dead(e.pid)]
    return bool(engines) and not any(case.progress[e.pid].frozen for e in engines)


def _users(case: Case) -> tuple[Member, ...]:
    return case.scene.workers or case.scene.engines


# -- gpu-xid ----------------------------------------------------------------------------------------------------------


def _faulty_devices(case: Case) -> Iterator[Finding]:
    snapshot = case.scene.snapshot
    owners = {m.pid: device_of(case.scene, case.scene.processes[m.pid])[0] for m in _users(case)}
    for member in _users(case):
        device = owners[member.pid]
        ill = [t for t in troubles(snapshot, device) if t.code in gpu().hard_troubles] if device is not None else []
        own = [x for x in xids(snapshot) if _is_ours(case, member, device, x)]
        if ill or own:
            yield _faulty(case, member, device, ill, own)
    if not any(owners.values()):
        yield from _nobodys(case)
    for driver in snapshot.drivers:
        if driver.problem == "hangs" and not any(t.code == "hangs" for d in snapshot.accelerators for t in d.troubles):
            subject = Subject(role="Host", label=f"{driver.vendor} driver")
            yield case.finding(
                "gpu-xid",
                subject,
                f"the driver of the GPUs does not answer: {driver.text}",
                evidence=[driver.text],
                severity=_severity(case, ["hangs"]),
                confidence="medium",
            )


def _is_ours(case: Case, member: Member, device: Accelerator | None, xid: Xid) -> bool:
    """It happened since the process started, to its device; a fault of a program only where it is this one."""
    process = case.scene.processes[member.pid]
    started = process.starttime / (case.scene.snapshot.node.clock_ticks or 100)
    if xid.t is not None and not case.scene.snapshot.pasted and xid.t < started:
        return False
    named = xid.pid is not None and xid.pid in {process.pid, *process.nspids}
    if not xid.hard:
        return named and xid.number in gpu().program_xids and not _woken(case)
    return named or (device is not None and is_at(device, xid.pci))


def _woken(case: Case) -> bool:
    """The engine has slept: a fault of a program is then judged together with that."""
    if _waking(case):
        return True
    found = (find(line.text, case.scene.version) for line in case.scene.snapshot.log_lines)
    return any(one is not None and one.kind.id == "woken" for one in found)


def _waking(case: Case) -> list[Member]:
    """Who is inside a call of wake_up."""
    frames = ((m, f.name) for m in case.scene.instance.members for t in case.acts[m.pid].threads for f in t.frames)
    waking = {m.pid for m, name in frames if name.rpartition(".")[2] == "wake_up"}
    return [m for m in case.scene.instance.members if m.pid in waking]


def _while_waking(case: Case) -> Iterator[Finding]:
    """Some are still in the wake-up, and a rank that was faster has used memory that was not mapped."""
    pids = {m.pid: m for m in _users(case)}
    hit = [x for x in xids(case.scene.snapshot) if x.number in gpu().program_xids and x.pid in pids]
    waking = _waking(case)
    if not hit or not waking:
        return
    first = pids[hit[0].pid or 0]
    yield case.finding(
        "sleep-wake-race",
        first.pid,
        f"{first.label} (pid {first.pid}) used memory that was not mapped, while {waking[0].label} is still in wake_up",
        evidence=[f"kernel: {x.text}" for x in hit[:2]]
        + [f"{m.label} (pid {m.pid}) is in wake_up" for m in waking[:3]],
        chain=case.chain(first.pid),
        confidence="medium",
    )


def _faulty(
    case: Case, member: Member, device: Accelerator | None, ill: Sequence[Trouble], own: Sequence[Xid]
) -> Finding:
    numbers = list(dict.fromkeys(x.number for x in own))
    pci = device.pci if device is not None and device.pci else next((x.pci for x in own), "")
    name = f"GPU {device.index}" if device is not None else "the GPU"
    name += f" at {pci}" if pci else ""
    said = [*(t.text for t in ill), *_in_words(numbers)]
    device_ill = troubles(case.scene.snapshot, device) if device is not None else ()
    hard = ill or any(x.hard for x in own)
    of_what = " (hardware or driver, not vLLM)" if hard else ""
    tail = "" if hard else " (brought on by the program, not by the hardware)"
    more = [f"{device.rows_remapped} rows of its memory were remapped"] if device and device.rows_remapped else []
    return case.finding(
        "gpu-xid",
        member.pid,
        f"{name}, of {member.label} (pid {member.pid}), is at fault{of_what}: {'; '.join(said[:4])}{tail}",
        evidence=[*(f"kernel: {x.text}" for x in own[-4:]), *(f"driver: {t.text}" for t in device_ill), *more],
        chain=case.chain(member.pid),
        confidence="high" if hard else "medium",
        severity=_severity(case, [*(t.code for t in ill), *(f"xid-{n}" for n in numbers)]),
    )


def _in_words(numbers: Sequence[int]) -> list[str]:
    return [f"Xid {n}, {gpu().xids.get(n, 'see the list of Xid errors')}" for n in numbers]


def _severity(case: Case, codes: Sequence[str]) -> Severity:
    return "warning" if _calm(case) and not set(codes) & _FATAL else "critical"


def _nobodys(case: Case) -> Iterator[Finding]:
    """Which GPU is whose is not known: a fault counts while nothing shows that the server is well."""
    snapshot = case.scene.snapshot
    named = {pid for m in _users(case) for pid in (m.pid, *case.scene.processes[m.pid].nspids)}
    lines = [x for x in xids(snapshot) if x.hard and x.pid not in named and snapshot.pasted]
    ill = [(d, t) for d in snapshot.accelerators for t in troubles(snapshot, d) if t.code in gpu().hard_troubles]
    if _calm(case) or not (lines or ill):
        return
    where = f"GPU {ill[0][0].index}" if ill else f"the GPU at {lines[0].pci}"
    said = [*(t.text for _, t in ill), *_in_words(list(dict.fromkeys(x.number for x in lines)))]
    yield case.finding(
        "gpu-xid",
        Subject(role="Host", label=where),
        f"{where} is at fault: {'; '.join(said[:4])}; which rank uses it is not known",
        evidence=[*(f"kernel: {x.text}" for x in lines[-4:]), *(f"GPU {d.index}: {t.text}" for d, t in ill)],
        confidence="medium",
    )


# -- fabric-manager ---------------------------------------------------------------------------------------------------


def _log(case: Case, kind: str) -> list[str]:
    lines = case.scene.snapshot.log_lines
    found = ((line.text, find(line.text, case.scene.version)) for line in lines)
    return [text for text, one in found if one is not None and one.kind.id == kind]


def _fabric(case: Case) -> Iterator[Finding]:
    snapshot = case.scene.snapshot
    said = _log(case, "fabric_not_ready")
    pending = [d for d in snapshot.accelerators if any(t.code == "fabric" for t in d.troubles)]
    off = [d for d in snapshot.drivers if d.fabric_manager == "not running"]
    ready = any(d.fabric == "completed" for d in snapshot.accelerators)
    if not (said or pending or (off and not ready and case.starting)):
        return
    words = [f"GPU {d.index}: {t.text}" for d in pending for t in d.troubles if t.code == "fabric"]
    words += ["nvidia-fabricmanager does not run on this machine"] if off else []
    summary = (
        "CUDA answers 802, system not yet initialized" if said else "GPUs are not registered with the NVSwitch fabric"
    )
    first = next(iter(_users(case)), None)
    yield case.finding(
        "fabric-manager",
        first.pid if first is not None else Subject(role="Host", label="NVSwitch fabric"),
        f"{summary}: {words[0] if words else 'the fabric manager is missing, or of another version than the driver'}",
        evidence=[*(f"log: {text}" for text in said[-2:]), *words[:8]],
        confidence="high" if said and words else "medium" if said or pending else "low",
    )


# -- memlock-limit ----------------------------------------------------------------------------------------------------


def _memlock(case: Case) -> Iterator[Finding]:
    said = _log(case, "memlock")
    if not said:
        return
    pids = [int(found["pid"]) for text in said if (found := _NCCL_PID.match(text))]
    processes = case.scene.processes
    users = _users(case)
    named = next((processes[pid] for pid in pids if pid in processes), None)
    process = named or (processes[users[0].pid] if users else next(iter(processes.values())))
    label = f"{case.label(process.pid)} (pid {process.pid})"
    limit, known = _memlock_of(process, case.scene.snapshot.pasted)
    free = case.scene.snapshot.node.mem_available
    if limit is not None:
        summary = f"{label} may lock {_mib(limit)} of memory: RDMA cannot register its buffers"
    elif known:
        summary = f"{label} cannot pin memory for RDMA although its limit is unlimited: memory is short or fragmented"
    else:
        summary = f"{label} cannot pin memory for RDMA; its limit of locked memory is not known"
    more = [f"{_mib(free)} of memory available"] if known and limit is None and free is not None else []
    told = f"Max locked memory of {process.pid}: {_mib(limit) if limit is not None else 'unlimited'}"
    yield case.finding(
        "memlock-limit",
        process.pid,
        summary,
        evidence=[*(f"log: {text}" for text in said[-2:]), *([told] if known else []), *more],
        chain=case.chain(process.pid),
        confidence="high" if limit is not None else "medium",
    )


def _memlock_of(process: Process, pasted: bool) -> tuple[int | None, bool]:
    """The limit (None: unlimited), and whether it is known."""
    limits = process.limits
    if not isinstance(limits, Limits) or (pasted and limits == Limits()):
        return None, False
    return limits.memlock, True


def memlock_words(group: Group) -> list[str]:
    """Ranks that use an RDMA card and may lock little memory."""
    words = []
    for rank in group.ranks:
        process = group.case.scene.processes[rank.pid]
        limit, _ = _memlock_of(process, group.case.scene.snapshot.pasted)
        rdma = any(path.startswith("/dev/infiniband/") for path in process.device_files)
        if rdma and limit is not None and limit < gpu().rdma_memlock_bytes:
            words.append(f"{rank.label} uses RDMA and may lock {_mib(limit)} of memory only")
    return words[:2]


def _mib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:g} MiB" if n >= 2**20 else f"{n / 2**10:g} KiB"


# -- wrong-arch-build -------------------------------------------------------------------------------------------------


def _architecture(case: Case) -> Iterator[Finding]:
    said = _log(case, "no_kernel_image")
    for member in _users(case):
        process = case.scene.processes[member.pid]
        device, _ = device_of(case.scene, process)
        capability = device.capability if device is not None else ""
        images = [image for one in _as_told(case, process) for image in one.kernels]
        words, never = not_built_for(images, capability)
        if not said and not words:
            continue
        what = f"the GPU of {member.label} is {architecture(capability) if capability else 'of another kind'}"
        built = f"; {words[0].rsplit('/', 1)[-1]}" if words else ""
        yield case.finding(
            "wrong-arch-build",
            member.pid,
            f"{what}{built}" + ("" if never or said else ": not for this one, so older or generic kernels run"),
            evidence=[*(f"log: {text}" for text in said[-2:]), *words],
            chain=case.chain(member.pid),
            confidence="high" if never or said else "medium",
        )
        return


def architecture(capability: str) -> str:
    """``12.1`` as compilers say it: ``sm_121``."""
    return "sm_" + capability.replace(".", "")


def not_built_for(images: Sequence[KernelImage], capability: str) -> tuple[list[str], bool]:
    """Libraries without kernels of a GPU's own, in words; and whether one of them cannot run there at all."""
    found = [(image, runs_on(image.archs, capability)) for image in images]
    own = architecture(capability)
    lacking = [i for i, runs in found if runs is False or (runs and not any(a.rstrip("af") == own for a in i.archs))]
    return [f"{i.path} is built for {', '.join(i.archs)}" for i in lacking], any(runs is False for _, runs in found)


def _as_told(case: Case, process: Process) -> list[Process]:
    """A process; in pasted evidence, which seldom says of whom a piece is, all of its instance after it."""
    others = case.scene.processes.values() if case.scene.snapshot.pasted else ()
    return [process, *(p for p in others if p is not process)]


# -- what tells of a wait ---------------------------------------------------------------------------------------------


def path_trouble(group: Group) -> tuple[list[str], bool]:
    """What is known to be wrong on the way between the GPUs of a group, and whether it is certain.

    GPUs that are joined by NVLink do not use the way over PCI.
    """
    snapshot = group.case.scene.snapshot
    devices = [r.device for r in group.ranks if r.device is not None]
    devices = devices if len(devices) > 1 else list(snapshot.accelerators)
    indices = {d.index for d in devices}
    peers = [p for d in devices for p in d.peers if p.index in indices]
    linked = any(link.up for d in devices for link in (d.readings[-1].links if d.readings else ()))
    told = [p.path for p in peers if p.path]
    if linked or (told and all(path.startswith("NV") for path in told)):
        return [], False
    if peers and all(p.p2p not in ("", "ok") for p in peers):
        return [], False  # the driver offers no direct access, so nobody uses it
    redirect = [b.pci for d in devices for b in d.bridges or () if b.redirects]
    hidden = any(b.redirects is None for d in devices for b in d.bridges or ())
    kinds = sorted({d.iommu for d in devices if d.iommu})
    translated = bool(kinds) and all(kind.lower().startswith("dma") for kind in kinds)
    words = []
    if redirect:
        count = len(set(redirect))
        words.append(f"{count} bridge{'s' if count > 1 else ''} on the way redirect{'' if count > 1 else 's'} (ACS)")
    if translated:
        words.append(f"the IOMMU translates (group type {', '.join(kinds)})")
    if kinds and not translated:
        return [], False  # the IOMMU passes addresses through: ACS alone does no harm
    if words and hidden and not redirect:
        words.append("ACS of the bridges not readable: only root may")
    if words and (levels := sorted({p.path for p in peers if p.path})):
        words.append(f"path between the GPUs: {', '.join(levels)}")
    return words, bool(redirect and translated)


def known_hangs(group: Group) -> list[str]:
    """Kernel libraries of the ranks that are known to hang, with the cure."""
    words: dict[str, None] = {}
    for rank in group.ranks:
        process = group.case.scene.processes[rank.pid]
        libraries = [path for one in _as_told(group.case, process) for path in one.libraries]
        traces = [*libraries, *(f"{f.name} ({f.file})" for f in rank.frames)]
        for package in gpu().packages:
            told = process.packages.get(package, "")
            version = told or next((v for path in libraries if (v := version_in_path(package, path))), "")
            found = known_hang(package, version, traces) if version else None
            if found is not None:
                words.setdefault(f"{package} {version} is in use: {found.text}; known cure: {found.next}")
    return list(words)

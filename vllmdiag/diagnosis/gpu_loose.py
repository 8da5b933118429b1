"""Layer 4 of evidence that shows no process of vLLM: a kernel log, devices or a report of NCCL beside a log."""

from __future__ import annotations

from collections.abc import Iterator

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.gpu import gpu
from vllmdiag.vllm.loglines import find, origin_of

from . import write
from .collectives import lagging
from .devices import Xid, is_at, seems_spinning, troubles, xids
from .gpu_facts import architecture, not_built_for
from .gpu_view import lag_in_words
from .motion import prompts_only

_HELD = 1 << 30
"""Less than that is what a driver and a desktop take."""


def loose_gpu_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Hard faults of a GPU or its driver, and ranks that NCCL counts apart. Whose they are is seldom known."""
    if not snapshot.pasted:
        return  # a fault of a machine without vLLM is no concern of ours, unless somebody hands it in
    yield from _devices(snapshot)
    yield from _drivers(snapshot)
    yield from _counts(snapshot)
    yield from _held_by_nobody(snapshot)
    yield from _built_for_others(snapshot)
    yield from _at_work_for_nothing(snapshot)


def _devices(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each device at fault, by its address where the driver does not list it."""
    hard = [x for x in xids(snapshot) if x.hard]
    for device in snapshot.accelerators:
        ill = [t.text for t in troubles(snapshot, device) if t.code in gpu().hard_troubles]
        own = [x for x in hard if is_at(device, x.pci)]
        hard = [x for x in hard if x not in own]
        if ill or own:
            yield _fault(snapshot, f"GPU {device.index}", ill, own)
    for pci in dict.fromkeys(x.pci for x in hard):
        yield _fault(snapshot, f"the GPU at {pci}", [], [x for x in hard if x.pci == pci])


def _fault(snapshot: Snapshot, name: str, ill: list[str], own: list[Xid]) -> Finding:
    numbers = dict.fromkeys(x.number for x in own)
    said = [*ill, *(f"Xid {n}, {gpu().xids.get(n, 'see the list of Xid errors')}" for n in numbers)]
    pid = next((x.pid for x in own if x.pid is not None), None)
    label = _label(snapshot, pid) if pid is not None else ""
    who = f", of {label} (pid {pid})" if label else f"; the kernel names pid {pid}" if pid is not None else ""
    return _say(
        "gpu-xid",
        Subject(role="Worker" if label else "Host", pid=pid if label else None, label=label or name),
        f"{name}{who}: {'; '.join(said[:4])}",
        [*(f"kernel: {x.text}" for x in own[-4:]), *(f"driver: {text}" for text in ill)],
        high=bool(label),
    )


def _label(snapshot: Snapshot, pid: int) -> str:
    """The name under which a log knows a process; empty where it does not."""
    found = (origin_of(line.text) for line in snapshot.log_lines)
    return next((one[0] for one in found if one is not None and one[1] == pid), "")


def _drivers(snapshot: Snapshot) -> Iterator[Finding]:
    for driver in snapshot.drivers:
        if driver.problem == "hangs":
            subject = Subject(role="Host", label=f"{driver.vendor} driver")
            yield _say("gpu-xid", subject, f"the driver of the GPUs does not answer: {driver.text}", [driver.text])


def _counts(snapshot: Snapshot) -> Iterator[Finding]:
    for lag in lagging(snapshot)[:1]:
        words = lag_in_words(lag)
        first = next(iter(lag.ranks), None)
        host = first.host if first is not None else ""
        label = f"rank {first.rank}" if first is not None else "the ranks"
        ranks = {"rank": first.rank} if first is not None else {}
        subject = Subject(role="Worker", pid=None, rank=ranks, node=host or None, label=label)
        hint = "what its process does is not in the evidence: take the stacks of all ranks"
        yield _say("collective-divergence", subject, f"NCCL: {words}", [words, hint], high=lag.moving is False)


def _held_by_nobody(snapshot: Snapshot) -> Iterator[Finding]:
    """Memory of a GPU that somebody holds who is not in the evidence, where nothing else was handed in."""
    if snapshot.logs or snapshot.metrics or snapshot.kernel_lines or snapshot.ras:
        return
    held = [(d, d.readings[-1]) for d in snapshot.accelerators if d.readings]
    held = [(d, r) for d, r in held if (r.memory_used or 0) >= _HELD]
    if not held:
        return
    words = [
        f"GPU {d.index} has {(r.memory_used or 0) / 2**30:.1f} GiB in use"
        + (f" and is busy {r.busy_pct} %" if r.busy_pct else "")
        for d, r in held
    ]
    users = [str(p.pid) for d, _ in held for p in d.processes or ()]
    yield write.finding(
        "unknown",
        Subject(role="Host", label=f"GPU {held[0][0].index}"),
        f"{words[0]}, and who holds it is not in the evidence",
        evidence=[
            *words[:8],
            *([f"the driver names pid {', '.join(users[:8])}"] if users else []),
            "no process of vLLM is in the evidence: its pid may be of another namespace, or the driver keeps the dead",
            "ps and nvidia-smi on the host, or in a pod with hostPID, show it: fuser -v /dev/nvidia*",
        ],
        layer=1,
        severity="warning",
        confidence="low",
    )


def _built_for_others(snapshot: Snapshot) -> Iterator[Finding]:
    """The libraries of vLLM that somebody has looked into hold no kernels for the GPU that is shown beside them."""
    images = [image for process in snapshot.processes for image in process.kernels]
    for capability in sorted({d.capability for d in snapshot.accelerators if d.capability}):
        words, never = not_built_for(images, capability)
        if words:
            summary = f"the GPU is {architecture(capability)}; {words[0].rsplit('/', 1)[-1]}"
            summary += "" if never else ": not for this one, so older or generic kernels run"
            yield _say("wrong-arch-build", Subject(role="Host", label="the build of vLLM"), summary, words, high=never)
            return


def _at_work_for_nothing(snapshot: Snapshot) -> Iterator[Finding]:
    """Devices or counters show that the GPU layer stands; nothing shows what the ranks do there."""
    spins = [d for d in snapshot.accelerators if seems_spinning(d)]
    halves = prompts_only(snapshot)
    lazy = [line.text for line in snapshot.log_lines if (one := find(line.text)) and one.kind.id == "p2p_unbatched"]
    words = [f"GPU {d.index}: busy, and no memory traffic" for d in spins]
    if halves and lazy:
        who = Subject(role="Worker", label="the stages of the pipeline")
        summary = "prompts are worked off and nothing is generated, and stages exchange over communicators of two"
        yield _say("pp-p2p-deadlock", who, summary, [*halves, f"log: {lazy[-1]}", *words])
    elif halves or (len(spins) > 1 and len(spins) == len(snapshot.accelerators)):
        summary = (
            "prompts are worked off, nothing is generated" if halves else "every GPU runs a kernel that only waits"
        )
        hint = "what would decide it: the stacks of all ranks (py-spy dump), twice, 30 s apart"
        yield _say("unknown", Subject(role="Worker", label="the ranks"), summary, [*halves, *words, hint], layer=4)


def _say(
    slug: str, who: Subject, summary: str, evidence: list[str], *, high: bool = False, layer: int | None = None
) -> Finding:
    doing = {
        "gpu-xid": "is at fault",
        "wrong-arch-build": "has no kernels for the GPU",
        "collective-divergence": "is not at the others' collective",
    }
    return write.finding(
        slug,
        who,
        summary,
        evidence=evidence,
        chain=(Link(subject=who, doing=doing.get(slug, "wait at the GPU")),),
        confidence="high" if high else "low" if slug == "unknown" else "medium",
        layer=layer,
    )

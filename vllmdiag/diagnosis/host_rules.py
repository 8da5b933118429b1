"""Layer 1: a host that does not let the server run: no processor to be had, or processes killed for memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllmdiag.model.diagnosis import Finding, Link, Subject
from vllmdiag.model.snapshot import Snapshot

from . import write
from .case import Case
from .log_context import killed_for_memory

_LOAD = 16.0
"""Runnable (or stuck) tasks a processor: a busy server with many threads stays well below."""
_MANY = 64
"""Processors that a host is taken to have where that was not told."""
_KERNEL = 0.7
_PRESSED = 0.9
_STARVED = 0.3
_DEATHS = ("worker-dead", "engine-dead", "orphan-engine")


def overloaded(snapshot: Snapshot) -> list[str]:
    """What shows that the host itself is the trouble, in words; empty where it is not, or where that is not known."""
    node = snapshot.node
    if node.load1 is None or node.load1 < _LOAD * (node.n_cpus or _MANY):
        return []
    words = []
    if node.kernel_share is not None and node.kernel_share >= _KERNEL:
        words.append(f"{node.kernel_share:.0%} of the time of all processors goes to the kernel")
    if node.pressure_cpu is not None and node.pressure_cpu >= _PRESSED:
        words.append(f"somebody waited for a processor in {node.pressure_cpu:.0%} of the last 10 s")
    on = f" on {node.n_cpus} processors" if node.n_cpus else ""
    return [f"load {node.load1:g}{on}", *words]


def host_findings(case: Case) -> Iterator[Finding]:
    """The host is overloaded, and the server does not get on."""
    words = overloaded(case.scene.snapshot)
    if not words:
        return
    starved = [
        f"{m.label} (pid {m.pid}) stood in the queue for a processor for {act.starved:.0%} of the window"
        for m in case.scene.instance.members
        if (act := case.acts[m.pid]).starved >= _STARVED
    ]
    if len(words) < 2 and not starved:
        return
    held = [e for e in case.scene.engines if case.progress[e.pid].frozen]
    silent = any(p.status is None and p.error == "timeout" for p in case.scene.probes)
    unseen = not any(case.acts[e.pid].seen or case.progress[e.pid].moved for e in case.scene.engines)
    stands = bool(held) or silent or unseen
    who = held[0].pid if held else case.scene.instance.roots[0]
    yield case.finding(
        "host-overloaded",
        who,
        f"the host is overloaded: {'; '.join(words)}",
        evidence=[*words, *starved[:3]],
        chain=case.chain(who),
        severity="critical" if stands else "info",
        confidence="high" if len(words) > 1 and starved else "medium",
    )


def memory_findings(case: Case, found: Sequence[Finding]) -> Iterator[Finding]:
    """A death that was found already, and that the kernel has brought about for want of memory."""
    snapshot = case.scene.snapshot
    for death in found:
        if death.cause not in _DEATHS or death.severity == "info":
            continue
        words = killed_for_memory(snapshot)
        if not words:
            continue
        yield write.finding(
            "oom-killed",
            death.subject,
            f"{death.summary}: the kernel has killed for memory",
            evidence=list(dict.fromkeys([*words, *death.evidence])),
            chain=death.chain,
            # The counter of a group is never reset: it may tell of an earlier death.
            confidence="high" if any(w.startswith("kernel:") for w in words) else "medium",
            words={"target": str(case.scene.instance.roots[0])},
        )
        return


def loose_memory_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """No process of vLLM is left, and the kernel says that it has killed one."""
    lines = [line.text for line in snapshot.kernel_lines if "illed process" in line.text and "VLLM::" in line.text]
    if lines:
        who = Subject(role="Instance", label="vLLM")
        yield write.finding(
            "oom-killed",
            who,
            "the kernel has killed a process of vLLM for memory, and none is left",
            evidence=[f"kernel: {line}" for line in lines[:3]],
            chain=(Link(subject=who, doing="was killed"),),
        )

"""Layer 4: a communicator that some ranks have made and others have not, or that nobody has."""

from __future__ import annotations

from vllmdiag.model.diagnosis import Finding
from vllmdiag.model.ranks import fold
from vllmdiag.vllm.loglines import find
from vllmdiag.vllm.stages import shim_in

from .gpu_facts import memlock_words
from .gpu_group import AWAY, IDLE, Group, Rank


def init_apart(group: Group) -> Finding | None:
    """Ranks in ncclCommInitRank while the others are past it; all of them, where only their stacks are known."""
    inside = group.at("nccl.init")
    past = [r for r in group.seen if r not in inside and "nccl.first" in r.ids]
    if not inside or group.of(AWAY, IDLE) or len(inside) + len(past) != len(group.seen):
        return None
    words = [*init_lines(group), *rdma_words(group, inside), *memlock_words(group)]
    if past:
        summary = (
            f"NCCL is made on some ranks only: {group.names(inside)} are in ncclCommInitRank, "
            f"{group.names(past)} have left it and wait for them"
        )
        return group.say("nccl-init-stuck", inside[0], summary, words, confidence="medium" if words else "low")
    if group.engine is not None:
        return None  # a start-up with its engine in sight is judged by its stages
    found = _shim(group)
    if found is not None:
        summary = f"{group.names(inside)} are in ncclCommInitRank and do not come back; {found[0]}"
        return group.say("preload-shim", inside[0], summary, found[1:], confidence=group.sure())
    summary = f"{group.names(inside)} are in ncclCommInitRank and do not come back"
    return group.say("nccl-init-stuck", inside[0], summary, words, confidence=group.sure())


def _shim(group: Group) -> list[str] | None:
    scene = group.case.scene
    preload = (scene.environ("LD_PRELOAD") or "").replace(":", " ").split()
    found = shim_in([*(path for r in group.ranks for path in scene.processes[r.pid].libraries), *preload])
    if found is None:
        return None
    path, shim = found
    return [
        f"{shim.name} stands between it and the driver",
        f"{path} is loaded: {shim.name}, {shim.meaning}",
        f"known cure: {shim.next}",
    ]


def init_lines(group: Group) -> list[str]:
    """What NCCL's own lines say: which ranks have begun a communicator and not finished it."""
    stages: dict[int, str] = {}
    size = 0
    for line in group.case.scene.snapshot.log_lines:
        known = find(line.text, group.case.scene.version)
        if known is not None and known.kind.id == "nccl_init":
            stages[int(known.groups["rank"])] = known.groups["state"]
            size = max(size, int(known.groups["nranks"]))
    begun = [rank for rank, state in stages.items() if state == "START"]
    done = [rank for rank, state in stages.items() if state == "COMPLETE"]
    unheard = [rank for rank in range(size) if rank not in stages]
    if not begun:
        return []
    words = f"NCCL's log: rank {fold(begun)} said Init START and not COMPLETE"
    words += f", rank {fold(done)} is through" if done else ""
    return [words + (f"; nothing is known of rank {fold(unheard)}: look at their nodes" if unheard else "")]


def rdma_words(group: Group, ranks: tuple[Rank, ...] = ()) -> list[str]:
    """RDMA ports that are not active, with the GPUs they are nearest to."""
    mine = {r.device.index for r in ranks if r.device is not None} or {group.ranks.index(r) for r in ranks}
    words = []
    for port in group.case.scene.snapshot.rdma:
        if port.state and port.state != "ACTIVE":
            near = f", the nearest to GPU {fold(port.devices)}" if port.devices else ""
            theirs = " of ranks that are not through" if mine & set(port.devices) else ""
            words.append(f"RDMA port {port.device}/{port.port} is {port.state}{near}{theirs}")
    return words

"""Layer 4: why ranks that wait at the GPU or in a collective do not come out of it. Asked only where nothing moves.

The order is that of certainty: a rank that does something of its own comes before counts, counts before stacks that
differ, and only where every rank stands at the same place does the place itself name the cause. Waiters are not blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllmdiag.model.diagnosis import Confidence, Finding
from vllmdiag.vllm.instances import Member

from .capture_rules import capture_words
from .case import Case
from .devices import busy
from .glimpse import AGAIN, glimpse
from .gpu_counts import counts_apart, records_apart
from .gpu_facts import fact_findings, known_hangs, path_trouble
from .gpu_group import AWAY, BLIND, COLLECTIVE, GPU, IDLE, KV, Group, Rank, group_of
from .motion import counters_moved, engine_of_metrics, prompts_only
from .nccl_rules import init_apart
from .startup import Standing

_PATIENCE_S = 30.0
"""A start-up younger than this is not called stuck."""


def gpu_findings(case: Case) -> Iterator[Finding]:
    """What is true whatever moves, and what holds up ranks whose engine is not in sight."""
    yield from fact_findings(case)
    if any(case.halted(w.pid) for w in case.scene.workers):
        return  # layer 1 has named the root
    for engine in case.scene.engines:
        workers = case.scene.instance.workers_of(engine.pid)
        yield from _decode_only(group_of(case, workers, engine))
    if case.scene.workers and not case.starting and not any(case.acts[e.pid].seen for e in case.scene.engines):
        for group in _groups(case):
            yield from _decode_only(group) if group.engine is None else ()
            yield from _without_engine(case, group)


def _groups(case: Case) -> Iterator[Group]:
    """Workers by engine, or together where it is not known whose they are."""
    owned = [(engine, own) for engine in case.scene.engines if (own := case.scene.instance.workers_of(engine.pid))]
    yield from (group_of(case, own, engine) for engine, own in owned)
    if not owned:
        yield group_of(case, case.scene.workers)


def held_up(case: Case, engine: Member) -> Finding | None:
    """Why a loaded engine that does not move is held up at the GPU; None where that is not what holds it up."""
    if case.acts[engine.pid].signature in KV:
        return _engine_in_connector(case, engine)
    if (apart := _engines_apart(case, engine)) is not None:
        return apart
    workers = case.scene.instance.workers_of(engine.pid)
    alone = [e for e in case.scene.engines if not case.scene.instance.workers_of(e.pid)]
    group = group_of(case, workers or alone, engine)
    return _decide(group, _SERVING)


def _engines_apart(case: Case, engine: Member) -> Finding | None:
    """Engines that run their steps together all stand, and not in the same step: one has passed what others wait in."""
    stuck = [e for e in case.scene.engines if case.progress[e.pid].frozen]
    theirs = {e.pid: case.scene.instance.workers_of(e.pid) for e in stuck if case.acts[e.pid].state != "collective"}
    group = group_of(case, [m for e in stuck for m in theirs.get(e.pid) or (e,)], engine)
    # Engines of a dense model stand for themselves: their stacks may differ for no reason.
    if len(stuck) < 2 or engine not in stuck or not group.at("dp.sync", "all2all"):
        return None
    return _decide(group, (counts_apart, records_apart, lambda found: _places_apart(found, told=bool(found.stands))))


def at_start(case: Case, places: Sequence[Standing]) -> Finding | None:
    """The same for a start-up that stands; None where its stage is the better answer."""
    meeting = {s.pid for s in places if s.stage is not None and s.stage.part == "meet" and s.stage.id != "worker.nccl"}
    engines: list[int | None] = [e.pid for e in case.scene.engines]
    for engine in engines or [None]:
        workers = [w for w in case.scene.workers if w.engine_pid == engine]
        group = group_of(case, workers, case.scene.members.get(engine) if engine is not None else None)
        if len(workers) < 2 or meeting & {w.pid for w in workers} or _too_young(case, workers):
            continue
        held = group.spinning is True and all(r.still for r in group.ranks)
        if not held and any(s.motion for s in places):
            continue
        # Much of a start-up is the same frame for long: only GPUs that wait make a fault of it in a live look.
        found = _decide(group, _STARTING if held or case.scene.snapshot.pasted else _STARTING[:_BY_RECORD])
        if found is not None:
            return found
    return None


def _too_young(case: Case, workers: Sequence[Member]) -> bool:
    ages = [case.scene.processes[w.pid].age_s for w in workers]
    return any(age is not None and age < _PATIENCE_S for age in ages)


def _decide(group: Group, rules: Sequence[Callable[[Group], Finding | None]]) -> Finding | None:
    if not group.seen or any(r.changes for r in group.of(COLLECTIVE, GPU)):
        return None
    return next((found for rule in rules if (found := rule(group)) is not None), None)


def _without_engine(case: Case, group: Group) -> Iterator[Finding]:
    """Workers are seen and their engine is not: on a node without it, or in evidence that holds only their stacks."""
    if counters_moved(case.scene.snapshot) or not group.of(COLLECTIVE, GPU, AWAY):
        return
    # A server that is looked at live may be between two steps: it takes more than a few equal stacks to call it stuck.
    shown = case.scene.snapshot.pasted or group.spinning or counters_moved(case.scene.snapshot) is False
    lagging = next((f for rule in (counts_apart, records_apart) if (f := rule(group)) is not None), None)
    if lagging is not None:
        yield lagging
    elif shown and (found := _decide(group, _GLIMPSED if glimpse(case) else _ALONE)) is not None:
        yield found


# -- somebody is elsewhere --------------------------------------------------------------------------------------------


def _engine_in_connector(case: Case, engine: Member) -> Finding:
    group = group_of(case, [engine], engine)
    (rank,) = group.ranks
    summary = f"{rank.label} is inside its KV connector, {rank.at}, and does not come back"
    return group.say("kv-connector-blocked", rank, summary, confidence=_sure_of(rank))


def _sure_of(rank: Rank) -> Confidence:
    """High where two looks or more show the same."""
    return "high" if rank.still else "medium"


def _connector(group: Group) -> Finding | None:
    inside = [r for r in group.ranks if r.act.signature in KV or (r.ids & KV and r.place in (GPU, AWAY))]
    if not inside or any(r.own_business for r in group.of(AWAY) if r not in inside):
        return None
    root = inside[0]
    rest = [r for r in group.ranks if r not in inside]
    others, n = group.names(rest), len(rest)
    summary = f"{root.label} is inside its KV connector, {root.at}, and does not come back"
    return group.say(
        "kv-connector-blocked",
        root,
        summary + (f"; {others} {'wait' if n > 1 else 'waits'} for it" if n else ""),
        confidence=_sure_of(root),
    )


def _own_business(group: Group) -> Finding | None:
    """Somebody does something that is no step of the model: with an engine in sight the rules of the queue name it."""
    away = [r for r in group.of(AWAY) if not (r.ids & KV)]
    if not away or not group.of(COLLECTIVE, GPU, IDLE):
        return None
    root = next((r for r in away if r.own_business), away[0])
    summary = f"{root.label} is inside one call, {root.at}; {group.names(group.of(COLLECTIVE, GPU))} wait for it"
    return group.say("worker-busy", root, summary, confidence=group.sure(), severity="warning")


def _one_waits_for_its_gpu(group: Group) -> Finding | None:
    """All others are in a collective that this one has not come to, because its GPU does not finish."""
    waiting, on_gpu = group.of(COLLECTIVE), group.of(GPU)
    if not waiting or not on_gpu or group.of(AWAY, IDLE, BLIND) or len(on_gpu) >= len(waiting) + 1:
        return None
    root = on_gpu[0]
    if root.member.role == "EngineCore" or root.ids & {"cuda.graph_replay", "cuda.graph_capture"}:
        summary = (
            f"{group.names(on_gpu)}: {root.act.doing}, at {root.at}; {group.names(waiting)}: {waiting[0].act.doing}"
        )
        return group.say("collective-divergence", root, f"ranks are not in the same step: {summary}")
    if root.device is not None and busy(root.device) is False:
        return None
    summary = f"{root.label} waits for a kernel of its GPU that does not end, at {root.at}"
    wait = "wait" if len(waiting) > 1 else "waits"
    summary += f"; {group.names(waiting)} {wait} for it in {waiting[0].act.doing}"
    return group.say("kernel-wedged", root, summary, known_hangs(group))


def _idle_among_waiters(group: Group) -> Finding | None:
    waiting, idle = group.of(COLLECTIVE), group.of(IDLE)
    if not waiting or not idle or group.of(AWAY, GPU):
        return None
    root = idle[0]
    summary = f"{group.names(waiting)} in {waiting[0].act.doing}; {root.label} is not in it: {root.act.doing}"
    return group.say("collective-divergence", root, summary, confidence=group.sure())


def _places_apart(group: Group, *, told: bool = False) -> Finding | None:
    """Every rank waits, and they stand at different places of the model: some have passed what others wait in."""
    ranks = group.of(COLLECTIVE, GPU)
    if len(ranks) < 2 or len(ranks) != len(group.seen) or _by_stage(group):
        return None
    paths: dict[object, list[Rank]] = {}
    for rank in ranks:
        paths.setdefault(rank.path, []).append(rank)
    # Stacks that differ are common on a server at work: they count where the GPUs wait, or where each look is the same.
    if len(paths) < 2 or not (told or group.spinning or all(r.still for r in ranks)):
        return None
    sides = sorted(paths.values(), key=len)
    few = sides[0]
    said = "; ".join(f"{group.names(side)} at {side[0].at}" for side in reversed(sides))
    summary = f"ranks stand at different places of the model: {said}"
    if len(few) * 2 < len(ranks):
        summary += (
            f". {group.names(few)} may be the one that has passed what the others wait in: nobody is blamed for it"
        )
    return group.say("collective-divergence", few[0], summary, confidence=group.sure(group.spinning is True))


def _by_stage(group: Group) -> bool:
    """Ranks of a pipeline: stages differ by their nature."""
    return len({r.member.ranks.get("pp", 0) for r in group.ranks}) > 1


# -- everybody is at the same place -----------------------------------------------------------------------------------


def _together(group: Group) -> bool:
    """One whose stack is not known may be the one who is missing, unless its GPU waits too."""
    ranks = group.of(COLLECTIVE, GPU)
    return bool(ranks) and len(ranks) == len(group.seen) and (group.spinning is True or not group.of(BLIND))


def _never_served(group: Group) -> bool:
    """Nothing shows that collectives have worked: a path that is bad now was bad before."""
    return group.engine is None or not group.case.in_loop(group.engine)


def _custom_all_reduce(group: Group) -> Finding | None:
    inside = group.at("custom_ar")
    if not _together(group) or len(inside) < 2 or len(inside) != len(group.seen) or group.at("cuda.graph_capture"):
        return None
    if group.spinning is False:
        return None
    words = path_trouble(group)[0] if _never_served(group) else []
    off = group.case.scene.environ("NCCL_P2P_DISABLE") == "1"
    where = f"{group.names(inside)} spin in vLLM's own all-reduce (no NCCL)"
    if words or off:
        more = ["NCCL_P2P_DISABLE=1 is set: it does not reach vLLM's own all-reduce"] if off else []
        summary = f"{where}: direct access between the GPUs does not work" + (
            "; NCCL_P2P_DISABLE=1 alone does not turn it off" if off else ""
        )
        return group.say("p2p-broken", inside[0], summary, [*more, *words], confidence=group.sure(bool(words)))
    return group.say(
        "custom-allreduce-spin", inside[0], where, confidence=group.sure(group.spinning is True or len(inside) > 1)
    )


def _workspace(group: Group) -> Finding | None:
    inside = group.at("allreduce.workspace")
    if not _together(group) or not inside or len(inside) != len(group.seen):
        return None
    summary = f"{group.names(inside)} stand in the set-up of a faster all-reduce: {inside[0].at}"
    return group.say("slow-fallback", inside[0], summary, confidence=group.sure())


def _graphs(group: Group) -> Finding | None:
    inside = group.at("cuda.graph_capture", "cuda.graph_replay")
    if not _together(group) or len(inside) < 2 or len(inside) != len(group.seen) or group.spinning is False:
        return None
    capture = group.at("cuda.graph_capture")
    what = "the capture of a CUDA graph" if capture else "the replay of a CUDA graph"
    summary = f"{group.names(inside)} stand in {what}: {inside[0].act.doing}, at {inside[0].at}"
    words = capture_words(group.case.scene.snapshot) + (path_trouble(group)[0] if _never_served(group) else [])
    return group.say("cudagraph-capture-stuck", inside[0], summary, words, confidence=group.sure())


def _all_to_all(group: Group) -> Finding | None:
    inside = group.at("all2all")
    if not _together(group) or len(inside) < 2 or len(inside) != len(group.seen):
        return None
    summary = f"all {len(inside)} ranks that are seen are in the all-to-all of the experts: {inside[0].at}"
    return group.say("all2all-stuck", inside[0], summary, confidence=group.sure(not group.remote))


def _others_are_remote(group: Group) -> Finding | None:
    inside = group.of(COLLECTIVE)
    if not inside or len(inside) != len(group.seen) or group.of(BLIND) or not group.remote:
        return None
    summary = (
        f"all {len(inside)} ranks of this node wait in {inside[0].act.doing}; {group.remote} ranks are on other nodes"
    )
    return group.say("remote-rank-stalled", inside[0], summary, confidence="medium")


def _others_are_unseen(group: Group) -> Finding | None:
    """One rank of several is all that is seen of an engine, and it waits for the others: whose fault is not known."""
    if group.engine is None or len(group.ranks) != 1 or not group.of(COLLECTIVE):
        return None
    (rank,) = group.ranks
    coupled = len(group.case.scene.engines) > 1 and rank.ids & {"dp.sync", "all2all"}  # waits for the other engines
    if group.remote or coupled or not rank.member.ranks.keys() & {"tp", "pp", "ep"}:
        return None
    summary = f"{rank.label} waits in {rank.at} for ranks that are not seen here, so it has not answered"
    return group.say("rank-never-answered", rank, summary)


def _pipeline(group: Group) -> Finding | None:
    inside = group.at("pp.exchange")
    stages = {r.member.ranks["pp"] for r in inside if "pp" in r.member.ranks}
    if not _together(group) or len(stages) < 2 or len(inside) != len(group.seen) or min(stages) != 0:
        return None
    pairs = "; ".join(f"{r.member.label} in {r.act.doing}" for r in inside[:4])
    summary = f"every stage of the pipeline waits for another one: {pairs}"
    return group.say("pp-p2p-deadlock", inside[0], summary, confidence=group.sure())


def _first_collective(group: Group) -> Finding | None:
    """A collective of NCCL that no rank leaves: a cause only where the way between the GPUs is known to be bad."""
    inside = group.of(COLLECTIVE)
    if not _together(group) or len(inside) < 2 or len(inside) != len(group.seen) or group.spinning is False:
        return None
    if group.at("nccl.init"):
        return None  # the communicator itself is not made
    first = len(group.at("nccl.first")) == len(inside)
    words, certain = path_trouble(group) if first or _never_served(group) else ([], False)
    off = group.case.scene.environ("NCCL_P2P_DISABLE") == "1"
    if words and not off:
        which = "first collective" if first else "collective"
        summary = (
            f"the {which} of {group.names(inside)} never ends: the way between their GPUs is not open ({words[0]})"
        )
        return group.say("p2p-broken", inside[0], summary, words, confidence=group.sure() if certain else "medium")
    if not first:
        return None
    summary = f"the first collective of {group.names(inside)} never ends; the communicator itself was made"
    hint = "what would decide it: ACS of the bridges (as root), the type of the IOMMU groups, nvidia-smi topo -p2p r"
    return group.say("unknown", inside[0], summary, [hint], confidence="low", layer=4)


def _kernel(group: Group) -> Finding | None:
    """One rank alone, and its GPU: no collective can be what it waits for."""
    if len(group.ranks) != 1 or not group.of(GPU):
        return None
    (rank,) = group.ranks
    load = busy(rank.device) if rank.device is not None else None
    if load is False:
        return None  # the GPU has nothing to do: the host has missed that it is done
    hangs = known_hangs(group)
    in_driver = any("libcuda" in frame.file for frame in rank.frames)
    if load is None and not hangs and not in_driver:
        return None
    summary = (
        f"a kernel on the GPU of {rank.label} does not end; the host waits at {rank.at}, and no collective is involved"
    )
    corroborated = load is True or bool(hangs)
    return group.say("kernel-wedged", rank, summary, hangs, confidence=group.sure(corroborated))


def _all_on_gpu(group: Group) -> Finding | None:
    """Every rank waits for its GPU in the same step: a kernel that is known to hang is the likely one."""
    inside = group.of(GPU)
    hangs = known_hangs(group)
    if len(inside) < 2 or len(inside) != len(group.seen) or not hangs:
        return None
    summary = f"{group.names(inside)} wait for their GPUs, at {inside[0].at}"
    return group.say("kernel-wedged", inside[0], summary, hangs)


def _undecided(group: Group) -> Finding | None:
    """Workers without an engine in sight that stand at the GPU: the layer is known, the cause is not."""
    inside = group.of(COLLECTIVE, GPU)
    if not inside:
        return None
    said = "; ".join(f"{group.names([r])}: {r.act.doing}" for r in inside[:3])
    summary = f"ranks wait at the GPU: {said}; {AGAIN if glimpse(group.case) else 'nothing moves'}"
    return group.say("unknown", inside[0], summary, confidence="low", layer=4)


_SHARED = (
    _custom_all_reduce, _workspace, _others_are_remote, _others_are_unseen, _all_to_all, _pipeline, _graphs,
    _first_collective,
)  # fmt: skip
_SERVING = (
    _connector, counts_apart, records_apart, init_apart, _one_waits_for_its_gpu, _places_apart, *_SHARED, _kernel,
    _all_on_gpu,
)  # fmt: skip
_STARTING = (_connector, counts_apart, records_apart, init_apart, _places_apart, *_SHARED)
_BY_RECORD = 4
"""So many of them go by more than the place at which a rank stands."""
_GLIMPSED = (init_apart, _undecided)
"""One look is enough where a rank makes a communicator: that takes a second, and nobody pastes it for nothing."""
_ALONE = (
    _connector, init_apart, _own_business, _one_waits_for_its_gpu, _idle_among_waiters, _places_apart, *_SHARED,
    _kernel, _all_on_gpu, _undecided,
)  # fmt: skip


# -- moves by halves --------------------------------------------------------------------------------------------------


def _decode_only(group: Group) -> Iterator[Finding]:
    """Prompts are worked off while not a token more is generated, and stages of a pipeline stand in their exchange."""
    inside = group.at("pp.exchange")
    stages = {r.member.ranks["pp"] for r in inside if "pp" in r.member.ranks}
    label = engine_of_metrics(group.engine) if group.engine is not None else None
    words = prompts_only(group.case.scene.snapshot, label)
    if len(stages) > 1 and words and not any(r.changes for r in inside):
        names = group.names(inside)
        summary = f"prompts are worked off and nothing is generated: {names} stand in the exchange between stages"
        yield group.say("pp-p2p-deadlock", inside[0], summary, words, confidence="medium")

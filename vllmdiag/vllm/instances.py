"""Which processes make one vLLM instance, and what each of them is. Pure: process values in, instances out.

Titles come second. vLLM before 0.10 sets none, a process has none for the first 10 to 20 s of its life, the API server
keeps its own command line, and workers of a dense DP model carry the same titles in every engine. So the parents say
who belongs together, the place in the tree what an untitled process is, and the order of start its rank
(vllm/v1/executor/multiproc_executor.py starts workers in rank order).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from vllmdiag.model.base import Fact, Missing
from vllmdiag.model.process import Process

from .rank_order import ranks_of, unsaid_numbers
from .serve_options import ServeOptions, job_of
from .titles import Identity, identify, is_supervisor, told

_SERVERS = ("APIServer", "Launcher", "Driver")
_SEEDS = ("APIServer", "EngineCore", "Worker", "DPCoordinator", "RayWorker")
_UNSEEN = "unseen"
_MADE = ("EngineCore", "Worker", "Child")
_TREE_ORDER = ("Launcher", "Driver", "APIServer", "DPCoordinator", "EngineCore", "Worker", "RayWorker", "Child")


class Member(Fact, frozen=True, kw_only=True):
    """One process of an instance, with the part it plays."""

    pid: int
    role: str
    """APIServer, Launcher (parent of several servers, or of a headless node), Driver (a script with the LLM class),
    EngineCore, Worker, DPCoordinator, ResourceTracker, RayWorker, Child (untitled, part not known yet), Helper."""
    label: str
    ranks: dict[str, int] = msgspec.field(default_factory=dict)
    engine_pid: int | None = None
    """For a worker: its EngineCore (or the process that plays it); None where that is on another node or gone."""
    parent_pid: int = 0
    depth: int = 0
    known_by: str = ""
    untitled: bool = False
    """It has not set its title yet: it starts, or is of a version that sets none."""


class Instance(Fact, frozen=True, kw_only=True):
    """One vLLM instance (or what is left of one)."""

    members: tuple[Member, ...]
    """In tree order, parents first, workers in rank order."""
    roots: tuple[int, ...]
    """Topmost members: one per tree."""
    options: ServeOptions | None = None
    """The arguments of `vllm serve`, where its command line could be read."""
    orphaned: bool = False
    """No API server, launcher or script stands above its engines or workers."""

    @property
    def pids(self) -> tuple[int, ...]:
        """All members."""
        return tuple(m.pid for m in self.members)

    def of(self, *roles: str) -> tuple[Member, ...]:
        """Members with one of these roles."""
        return tuple(m for m in self.members if m.role in roles)

    def member(self, pid: int) -> Member | None:
        """The member with that pid."""
        return next((m for m in self.members if m.pid == pid), None)

    def workers_of(self, engine_pid: int) -> tuple[Member, ...]:
        """Workers of one engine, in rank order."""
        return tuple(m for m in self.members if m.role in ("Worker", "RayWorker") and m.engine_pid == engine_pid)


def find_instances(processes: Iterable[Process]) -> tuple[Instance, ...]:
    """Group processes into instances, by tree, then by job (two nodes of one job on one host), then by process group.

    Args:
        processes: every process of the host, or those that evidence names.

    Returns:
        Instances ordered by their lowest root pid. A process that has died meanwhile counts like any other.
    """
    by_pid = {p.pid: p for p in processes}
    identities = {pid: _identify(p) for pid, p in by_pid.items()}
    children: dict[int, list[Process]] = defaultdict(list)
    for process in by_pid.values():
        children[process.ppid].append(process)
    for siblings in children.values():
        siblings.sort(key=lambda p: (p.starttime, p.pid))
    seeds = [pid for pid, known in identities.items() if known is not None and known.role in _SEEDS]
    roots = {_root(pid, by_pid, identities) for pid in seeds}
    roots |= _untitled_roots(by_pid, identities, children) - _below(roots, children)
    taken: set[int] = set()
    trees = [_tree(root, by_pid, identities, children, taken) for root in sorted(roots) if root not in taken]
    return tuple(_label(instance) for instance in _join(trees, by_pid))


def _identify(process: Process) -> Identity | None:
    cmdline: Sequence[str] = () if isinstance(process.cmdline, Missing) else process.cmdline
    known = identify(cmdline, process.comm)
    if process.told_role and (known is None or known.role in ("Child", "APIServer")):
        return told(process.told_role)
    return known


def _root(pid: int, by_pid: dict[int, Process], identities: dict[int, Identity | None]) -> int:
    """The topmost process above `pid` that belongs to the instance."""
    seen = {pid}
    while True:
        process = by_pid[pid]
        parent = by_pid.get(process.ppid)
        if parent is None or parent.pid in seen:
            return pid
        seen.add(parent.pid)
        known, below = identities[parent.pid], identities[pid]
        if (known is not None and known.role in (*_SEEDS, "Child")) or (
            below is not None and below.role in ("EngineCore", "Worker", "Child") and _is_driver(parent, process)
        ):
            pid = parent.pid
        else:
            return pid


def _is_driver(parent: Process, child: Process) -> bool:
    """The parent is the Python script that uses the LLM class, not a sub-reaper that adopted an orphan.

    It may be pid 1 of a container. A child of multiprocessing stays in its group; an orphan keeps its dead maker's.
    """
    if not _is_python(parent) or (not isinstance(parent.cmdline, Missing) and is_supervisor(parent.cmdline)):
        return False
    return not (parent.pgid and child.pgid) or parent.pgid == child.pgid


def _is_python(process: Process) -> bool:
    names = [process.comm]
    if not isinstance(process.cmdline, Missing) and process.cmdline:
        names.append(process.cmdline[0].split(" ")[0].rsplit("/", 1)[-1])
    if not isinstance(process.exe, Missing):
        names.append(process.exe.rsplit("/", 1)[-1])
    return any(name.startswith(("python", "pypy")) for name in names)


def _untitled_roots(
    by_pid: dict[int, Process], identities: dict[int, Identity | None], children: dict[int, list[Process]]
) -> set[int]:
    """Scripts of versions without titles: python -> spawn_main (engine) -> spawn_main (workers)."""
    found = set()
    for pid, known in identities.items():
        if known is None or known.role != "Child":
            continue
        if not any(_is_child(identities.get(c.pid)) for c in children.get(pid, ())):
            continue
        parent = by_pid.get(by_pid[pid].ppid)
        if parent is not None and _is_driver(parent, by_pid[pid]) and not _is_child(identities.get(parent.pid)):
            found.add(parent.pid)
    return found


def _is_child(known: Identity | None) -> bool:
    return known is not None and known.role == "Child"


def _below(roots: Iterable[int], children: dict[int, list[Process]]) -> set[int]:
    found: set[int] = set()
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid in found:
            continue
        found.add(pid)
        queue.extend(c.pid for c in children.get(pid, ()))
    return found


def _tree(
    root: int,
    by_pid: dict[int, Process],
    identities: dict[int, Identity | None],
    children: dict[int, list[Process]],
    taken: set[int],
) -> Instance:
    """The tree below `root`. Evidence from files may hold parents in a circle, so each process is taken once."""
    known = identities[root]
    options = known.options if known is not None else None
    members: list[Member] = []

    def walk(process: Process, parent: Member | None, depth: int) -> None:
        member = _member(process, parent, depth, identities, children, options)
        members.append(member)
        taken.add(process.pid)
        for child in sorted(children.get(process.pid, ()), key=lambda c: _order(identities.get(c.pid), c)):
            if child.pid not in taken:
                walk(child, member, depth + 1)

    walk(by_pid[root], None, 0)
    members = _ranked(members, by_pid, options)
    orphaned = members[0].role not in _SERVERS and not by_pid[root].parent_unseen
    return Instance(members=tuple(members), roots=(root,), options=options, orphaned=orphaned)


def _order(known: Identity | None, process: Process) -> tuple[int, list[int], int, int]:
    role = known.role if known is not None else ""
    place = _TREE_ORDER.index(role) if role in _TREE_ORDER else len(_TREE_ORDER)
    ranks = known.ranks if known is not None else {}
    return place, [ranks.get(k, -1) for k in ("index", "dp", "pp", "tp", "ep")], process.starttime, process.pid


def _member(
    process: Process,
    parent: Member | None,
    depth: int,
    identities: dict[int, Identity | None],
    children: dict[int, list[Process]],
    options: ServeOptions | None,
) -> Member:
    known = identities[process.pid]
    role, known_by, untitled = ("", "", True) if known is None else (known.role, known.known_by, known.role == "Child")
    ranks = dict(known.ranks) if known is not None else {}
    label = known.name if known is not None else ""
    below = [identities.get(c.pid) for c in children.get(process.pid, ())]
    if parent is None:
        if role == "APIServer" and (known is not None and (known.headless or _has(below, "APIServer", "title"))):
            role, label = "Launcher", "Launcher"
        elif role not in _SEEDS:
            # A script above an engine; where its children are the workers themselves, it is the engine too.
            has_engine = _has(below, "EngineCore") or _grandchildren_start(process, identities, children)
            role, known_by, label = ("Driver" if has_engine else "EngineCore"), "position", ""
            label, untitled = role, False
    elif (role == "APIServer" and known_by != "title") or (known and (role, label) == (parent.role, parent.label)):
        # A child of fork or vfork still shows its parent's command line or title.
        role, known_by, label, untitled = "Child", "position", "", True
    if role == "Child" and parent is not None:
        role, label = _part_of_child(parent, below, options)
        known_by, ranks = "position", {}
    if not role:
        role, label, known_by, untitled = "Helper", process.comm or "helper", "parent", False
    engine_pid = parent.pid if parent and parent.role == "EngineCore" and role in ("Worker", "RayWorker") else None
    return Member(
        pid=process.pid,
        role=role,
        label=label or role,
        ranks=ranks,
        engine_pid=engine_pid,
        parent_pid=process.ppid,
        depth=depth,
        known_by=known_by,
        untitled=untitled,
    )


def _has(identities: Iterable[Identity | None], role: str, known_by: str | None = None) -> bool:
    return any(
        k is not None and k.role == role and (known_by is None or k.known_by in (known_by, "comm")) for k in identities
    )


def _grandchildren_start(
    process: Process, identities: dict[int, Identity | None], children: dict[int, list[Process]]
) -> bool:
    return any(
        _is_child(identities.get(c.pid))
        and any(_has([identities.get(g.pid)], role) for g in children.get(c.pid, ()) for role in _MADE)
        for c in children.get(process.pid, ())
    )


def _part_of_child(parent: Member, below: Sequence[Identity | None], options: ServeOptions | None) -> tuple[str, str]:
    """Role and label of an untitled child, from where it hangs."""
    if parent.role == "EngineCore":
        return "Worker", "Worker"
    if parent.role == "Driver" and _has(below, "EngineCore"):  # an LLM for each rank of data parallelism
        return "Driver", "Driver"
    if any(k is not None and k.role in ("Worker", "Child") for k in below):
        return "EngineCore", "EngineCore"
    single = options is None or (options.data_parallel_size <= 1 and (options.api_server_count or 1) <= 1)
    if parent.role in ("APIServer", "Driver") and single:
        return "EngineCore", "EngineCore"
    if parent.role == "Launcher" and options is not None and options.headless and options.nnodes > 1:
        return "Worker", "Worker"
    return "Child", "untitled child"


def _ranked(members: list[Member], by_pid: dict[int, Process], options: ServeOptions | None) -> list[Member]:
    """Give each worker without ranks its own, where they can be told."""
    tp = options.tensor_parallel_size if options is not None else 0
    pp = options.pipeline_parallel_size if options is not None else 0
    local = options.world_size // options.nnodes if options is not None else 0
    result = list(members)
    for engine_pid in {m.engine_pid for m in members if m.role == "Worker"}:
        places = [i for i, m in enumerate(result) if m.role == "Worker" and m.engine_pid == engine_pid]
        places.sort(key=lambda i: (by_pid[result[i].pid].starttime, result[i].pid))
        if len(places) < 2 and tp * pp <= 1:
            continue
        said = [result[i].ranks for i in places]
        dead = [result[i].known_by == "comm" for i in places]
        first = _first_local_rank(options, len(places))
        for n, number in unsaid_numbers(said, dead, first=first, local=local, tp=tp).items():
            ranks = ranks_of(number, tp, pp)
            name = "Worker_" + "_".join(f"{k.upper()}{v}" for k, v in ranks.items())
            member = result[places[n]]
            result[places[n]] = msgspec.structs.replace(member, ranks=ranks, label=name, known_by="order of start")
    return result


def _first_local_rank(options: ServeOptions | None, n_local: int) -> int:
    if options is None or options.nnodes <= 1:
        return 0
    return options.node_rank * (options.world_size // options.nnodes or n_local)


def _join(trees: list[Instance], by_pid: dict[int, Process]) -> list[Instance]:
    """Merge the trees of one job: two nodes on one host, or what a dead parent left behind."""
    groups: dict[object, list[Instance]] = defaultdict(list)
    for tree in trees:
        groups[_job(tree, by_pid)].append(tree)
    # Stacks name no parents: workers without a server belong to the only one that there is.
    strays = groups.get(_UNSEEN, [])
    if strays and len(groups) == 2 and not any(tree.of(*_SERVERS, "EngineCore") for tree in strays):
        del groups[_UNSEEN]
        next(iter(groups.values())).extend(strays)
    return [_merge(group, by_pid) for group in groups.values()]


def _job(tree: Instance, by_pid: dict[int, Process]) -> object:
    shared = job_of(tree.options)
    if shared is not None:
        return shared
    if by_pid[tree.roots[0]].parent_unseen:
        return _UNSEEN  # pasted stacks name no parents: nothing says that these are several servers
    # Orphans keep the process group of their dead parent, so does a server whose engine died under it.
    root = by_pid[tree.roots[0]]
    return ("group", root.pgid) if root.pgid else ("left to", root.ppid) if tree.orphaned else ("root", root.pid)


def _merge(group: list[Instance], by_pid: dict[int, Process]) -> Instance:
    if len(group) == 1:
        return group[0]
    # The head first: the tree with an API server, then by node rank.
    group = sorted(
        group, key=lambda t: (t.orphaned, not t.of("APIServer"), t.options.node_rank if t.options else 0, t.roots)
    )
    head = group[0]
    engines = [m for t in group for m in t.members if m.role == "EngineCore"]
    members = []
    for tree in group:
        for member in tree.members:
            lone = member.role in ("Worker", "RayWorker") and member.engine_pid is None
            apart = by_pid[member.pid].parent_unseen or (head.options is not None and head.options.nnodes > 1)
            theirs = _engine_of(member, engines) if lone and apart else member.engine_pid
            members.append(msgspec.structs.replace(member, engine_pid=theirs))
    return Instance(
        members=tuple(_ranked(members, by_pid, head.options)),
        roots=tuple(root for tree in group for root in tree.roots),
        options=head.options,
        orphaned=head.orphaned,
    )


def _engine_of(worker: Member, engines: list[Member]) -> int | None:
    """The engine of a worker whose parent is not known: the only one, or the one of its data-parallel rank."""
    if len(engines) == 1:
        return engines[0].pid
    rank = worker.ranks.get("dp")
    same = [e for e in engines if rank is not None and e.ranks.get("dp") == rank]
    return same[0].pid if len(same) == 1 else None


def _label(instance: Instance) -> Instance:
    """Make labels unique: twins of two engines are told apart by the engine they belong to."""
    counts = Counter(member.label for member in instance.members)
    engine_label = {m.pid: m.label for m in instance.of("EngineCore")}
    engine_dp = {m.pid: m.ranks["dp"] for m in instance.of("EngineCore") if "dp" in m.ranks}
    members = []
    for member in instance.members:
        label, ranks = member.label, member.ranks
        if member.engine_pid in engine_label and counts[label] > 1 and "dp" not in ranks:
            label = f"{engine_label[member.engine_pid]}/{label}"
        if member.engine_pid in engine_dp:
            ranks = {"dp": engine_dp[member.engine_pid]} | ranks
        members.append(msgspec.structs.replace(member, label=label, ranks=ranks))
    return msgspec.structs.replace(instance, members=tuple(members))

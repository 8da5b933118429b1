"""Which node a process belongs to, who of another node is awaited, and what cannot be known from here."""

from __future__ import annotations

from vllmdiag.model.diagnosis import Subject

from .case import Case


def absent(case: Case) -> Subject | None:
    """Who the arguments say must come and is not on this machine."""
    options = case.scene.options
    if options is None:
        return None
    if options.nnodes > 1:
        here = _nodes_here(case)
        missing = [n for n in range(options.nnodes) if n not in here]
        if missing:
            label = f"node {missing[0]} of {options.nnodes}" + (" (the head node)" if missing[0] == 0 else "")
            role = "EngineCore" if missing[0] == 0 else "Worker"
            return Subject(role=role, label=label, node=f"node {missing[0]}")
    if options.headless and options.data_parallel_size > 1 and not case.scene.servers:
        return Subject(role="APIServer", label="the head node")
    local = options.data_parallel_size_local
    engines = len(case.scene.engines)
    if local is not None and local < options.data_parallel_size and engines < options.data_parallel_size:
        n = options.data_parallel_size - engines
        return Subject(role="EngineCore", label=f"{n} remote EngineCore{'s' if n > 1 else ''}")
    return None


def _nodes_here(case: Case) -> set[int]:
    """Node ranks of the trees on this machine."""
    ranks = {case.scene.node_rank(root) for root in case.scene.instance.roots}
    return {rank for rank in ranks if rank is not None}


def beyond_sight(case: Case, lost: Subject | None) -> list[str]:
    """What is seen of the nodes that are awaited, and what this node alone cannot know."""
    options = case.scene.options
    if options is None or (options.nnodes <= 1 and lost is None):
        return []
    words = _at_the_store(case)
    if lost is not None:
        words.append(
            f"{lost.label} is not on this machine: whether it was never started, is stopped, dead or cut off cannot be"
            " known from here; run `vllmdiag diagnose` there"
        )
    return [*words, *_apart(case)]


def _at_the_store(case: Case) -> list[str]:
    """Who is connected to the master port."""
    options = case.scene.options
    if options is None or not options.master_port:
        return []
    port = options.master_port
    store = next((s for s in case.scene.listeners if s.family != "unix" and s.port == port), None)
    peers = [s for s in case.scene.snapshot.sockets if s.family != "unix" and s.port == port and s.state == "ESTAB"]
    if store is None:
        tries = [s for s in case.scene.snapshot.sockets if s.remote_port == port and s.state == "SYN-SENT"]
        return [f"nobody answers at {options.master_addr}:{port}: {len(tries)} connects hang"] if tries else []
    return [f"the store at port {port} has {len(peers)} of {options.world_size} ranks connected"]


def _apart(case: Case) -> list[str]:
    """Members that live in other network namespaces than the head: an address of one means nothing in the other."""
    networks = case.scene.snapshot.networks
    head = next((n for n in networks if case.scene.instance.roots[0] in n.pids), None)
    if head is None:
        return []
    words = []
    for network in networks:
        if network is head:
            continue
        labels = [case.label(pid) for pid in network.pids if pid in case.scene.members]
        nodes = {case.scene.node_rank(pid) for pid in network.pids if pid in case.scene.members} - {None}
        where = f"node {', '.join(map(str, sorted(n for n in nodes if n is not None)))}: " if nodes else ""
        words.append(
            f"{where}{', '.join(labels)} live in another network namespace (net:[{network.netns}]) than"
            f" {case.label(case.scene.instance.roots[0])}: they cannot meet at {_address(case)}"
        )
    return words


def _address(case: Case) -> str:
    options = case.scene.options
    return (options.master_addr or "127.0.0.1") if options is not None else "127.0.0.1"

"""A plan says what live servers were seen to hold; what cannot be started says which number is in the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.errors import UsageError
from vllmdiag.model.plan import NodePlan, Plan, Topology
from vllmdiag.plan.make import plan

RING_2, RING_1, REPLY, GROUP = 167772190, 167772180, 251658260, 25165836

# Recorded from vLLM 0.32.0 on CPU, where one rank also has a worker of its own: processes by role, sizes of its rings,
# unix sockets that listen, and the highest descriptor of each role plus one.
RECORDED: dict[str, tuple[Topology, dict[str, int], list[int], int, dict[str, int]]] = {
    "tp1": (
        Topology(gpus_per_node=1, executor="mp"),
        {"APIServer": 1, "EngineCore": 1, "Worker": 1},
        [RING_1, REPLY],
        6,
        {"APIServer": 38, "EngineCore": 57, "Worker": 87},
    ),
    "tp2": (
        Topology(gpus_per_node=2, tp=2),
        {"APIServer": 1, "EngineCore": 1, "Worker": 2},
        [GROUP, RING_2, REPLY, REPLY],
        10,
        {"APIServer": 38, "EngineCore": 75, "Worker": 105},
    ),
    "pp2": (
        Topology(gpus_per_node=2, pp=2),
        {"APIServer": 1, "EngineCore": 1, "Worker": 2},
        [RING_2, REPLY, REPLY],
        8,
        {"APIServer": 36, "EngineCore": 68, "Worker": 92},
    ),
    "dp2": (
        Topology(gpus_per_node=2, dp=2, executor="mp"),
        {"Launcher": 1, "DPCoordinator": 1, "APIServer": 2, "EngineCore": 2, "Worker": 2},
        [RING_1, RING_1, REPLY, REPLY],
        15,
        {"APIServer": 43, "EngineCore": 65, "Worker": 87, "DPCoordinator": 24},
    ),
    "api2": (
        Topology(gpus_per_node=1, api_servers=2, executor="mp"),
        {"Launcher": 1, "APIServer": 2, "EngineCore": 1, "Worker": 1},
        [RING_1, REPLY],
        8,
        {"APIServer": 32, "EngineCore": 61, "Worker": 87},
    ),
    "tp2dp2": (
        Topology(gpus_per_node=4, tp=2, dp=2),
        {"Launcher": 1, "DPCoordinator": 1, "APIServer": 2, "EngineCore": 2, "Worker": 4},
        [GROUP, GROUP, RING_2, RING_2, *[REPLY] * 4],
        23,
        {"APIServer": 43, "EngineCore": 83, "Worker": 105, "DPCoordinator": 24},
    ),
}


def processes(kind: NodePlan) -> dict[str, int]:
    """By role, without the resource tracker."""
    return {r.role: r.processes for r in kind.roles if r.role != "ResourceTracker"}


def files(kind: NodePlan) -> list[int]:
    """Sizes of all rings."""
    return sorted(ring.file_bytes for ring in kind.rings for _ in range(ring.count))


@pytest.mark.parametrize("name", RECORDED)
def test_a_plan_says_what_was_recorded_of_live_servers(name: str) -> None:
    topology, roles, rings, paths, fds = RECORDED[name]
    (kind,) = plan(topology).kinds
    assert processes(kind) == roles
    assert files(kind) == sorted(rings)
    assert kind.shm_bytes == sum(rings)
    assert kind.unix_paths == paths
    planned = {r.role: r.fds for r in kind.roles if r.fds is not None}
    assert planned == {role: pytest.approx(n, rel=0.15) for role, n in fds.items()}


def test_an_engine_over_two_nodes_has_its_rings_where_they_were_seen() -> None:
    made = plan(Topology(nodes=2, gpus_per_node=1, tp=2))
    head, follower = made.kinds
    assert (processes(head), files(head)) == ({"APIServer": 1, "EngineCore": 1, "Worker": 1}, [GROUP, RING_1])
    assert (processes(follower), files(follower)) == ({"Launcher": 1, "Worker": 1}, [])
    assert head.rings[0].remote_readers == 1
    assert [(s.name, s.listeners) for s in follower.sockets] == [("remote response", 1)]
    assert any("crosses nodes" in note for note in made.notes)


def test_engines_of_other_nodes_are_reached_over_tcp() -> None:
    head, headless = plan(Topology(nodes=2, gpus_per_node=1, dp=2, executor="mp")).kinds
    assert processes(headless) == {"Launcher": 1, "EngineCore": 1, "Worker": 1}
    tcp = {s.name: s.listeners for s in head.sockets if s.transport == "tcp"}
    assert tcp == {
        "engine input": 2,
        "engine output": 2,
        "coordinator back output": 1,
        "coordinator back publish": 1,
    }
    assert "29550" in {port.port for port in head.ports}


def test_nodes_without_data_parallelism_are_servers_of_their_own() -> None:
    made = plan(Topology(nodes=48, gpus_per_node=8, tp=8))
    assert (made.jobs, made.nodes_per_job, made.idle_gpus) == (48, 1, 0)
    assert [(k.kind, k.nodes, k.ranks) for k in made.kinds] == [("node", 48, 8)]


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (Topology(tp=16), "need 2 nodes"),
        (Topology(nodes=2, tp=12), "do not fill nodes of 8"),
        (Topology(nodes=2, tp=8, dp=3), "need 3 nodes"),
        (Topology(tp=4, dp=4, dp_local=4), "need 16 GPUs"),
        (Topology(tp=2, executor="uni"), "runs one rank"),
        (Topology(tp=0), "less than 1"),
        (Topology(nodes=2, tp=16, version="0.10.2"), "needs vLLM 0.11.1"),
    ],
)
def test_what_cannot_be_started_says_which_number_is_in_the_way(topology: Topology, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(topology)
    assert why in raised.value.why


def test_a_limit_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError):
        plan(Topology(), {"fids": (1, "given")})


def test_what_breaks_as_it_is_comes_first_and_the_least_room_next() -> None:
    made = plan(Topology(tp=2), {"nofile": (120, "given"), "shm": (500 << 20, "given")})
    first, second = made.breaks[:2]
    assert (first.where, first.need > first.value, first.grows) == ("all files of /dev/shm of a node", True, "as it is")
    assert (second.where, second.at, second.grows) == ("Worker", 3, "ranks of an engine (tp)")
    rest = [b.at / b.now for b in made.breaks[1:] if b.at is not None]
    assert rest == sorted(rest)


@given(st.integers(1, 8), st.integers(60, 4000))
def test_a_plan_breaks_where_it_says_and_not_one_earlier(tp: int, nofile: int) -> None:
    made = plan(Topology(tp=tp), {"nofile": (nofile, "given")})
    for row in made.breaks:
        if row.limit == "nofile" and row.grows == "API servers" and row.at is not None:
            assert _fds(row.where, tp, row.at) > nofile >= _fds(row.where, tp, row.at - 1)


def _fds(role: str, tp: int, servers: int) -> int:
    (kind,) = plan(Topology(tp=tp, api_servers=servers)).kinds
    return max(r.fds or 0 for r in kind.roles if r.role == role)


sizes = st.builds(
    Topology,
    nodes=st.integers(1, 64),
    gpus_per_node=st.sampled_from([1, 2, 4, 8]),
    tp=st.integers(1, 32),
    pp=st.integers(1, 4),
    dp=st.integers(1, 64),
    ep=st.booleans(),
)


@given(sizes)
def test_whatever_can_be_placed_has_every_rank_and_engine_once(topology: Topology) -> None:
    try:
        made = plan(topology)
    except UsageError:
        return
    ranks = topology.tp * topology.pp
    assert sum(k.nodes * k.ranks for k in made.kinds) == made.jobs * topology.dp * ranks
    assert sum(k.nodes * k.engines for k in made.kinds) == made.jobs * topology.dp
    assert sum(k.nodes for k in made.kinds) == made.jobs * made.nodes_per_job <= topology.nodes
    assert all(k.ranks <= topology.gpus_per_node for k in made.kinds)
    _readers_are_ranks(made)


def _readers_are_ranks(made: Plan) -> None:
    """Every rank of an engine reads its commands, by ring or over TCP."""
    top = made.topology
    for kind in made.kinds:
        for ring in kind.rings:
            if ring.queue == "broadcast":
                assert ring.readers + ring.remote_readers == top.tp * top.pp

"""Which processes make an instance, and what each is: trees as they were seen on live servers, and broken ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.process import Process
from vllmdiag.vllm.instances import Instance, find_instances

SPAWN = (
    "/v/bin/python",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=9)",
    "--multiprocessing-fork",
)
TRACKER = ("/v/bin/python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(22)")


def serve(*args: str) -> tuple[str, ...]:
    return ("/v/bin/python", "/v/bin/vllm", "serve", "m", *args)


def process(pid: int, ppid: int, cmdline: tuple[str, ...] | str, pgid: int = 0, comm: str = "python") -> Process:
    words = (cmdline,) if isinstance(cmdline, str) else cmdline
    exe = "/v/bin/python3.11" if comm == "python" else f"/usr/bin/{comm}"
    return Process(pid=pid, ppid=ppid, starttime=pid, pgid=pgid, comm=comm, cmdline=words, exe=exe)


def only(*processes: Process) -> Instance:
    (instance,) = find_instances(processes)
    return instance


def labels(instance: Instance) -> dict[int, str]:
    return {m.pid: m.label for m in instance.members}


def test_a_titled_server_of_two_ranks() -> None:
    found = only(
        process(10, 1, serve("--tensor-parallel-size", "2", "--port", "8011"), 10),
        process(11, 10, TRACKER, 10),
        process(12, 10, "VLLM::EngineCore", 10),
        process(13, 12, "VLLM::Worker_TP0", 10),
        process(14, 12, "VLLM::Worker_TP1", 10),
    )
    assert labels(found) == {
        10: "APIServer",
        12: "EngineCore",
        13: "Worker_TP0",
        14: "Worker_TP1",
        11: "ResourceTracker",
    }
    assert not found.orphaned
    assert [w.pid for w in found.workers_of(12)] == [13, 14]
    assert found.options is not None
    assert found.options.port == 8011


def test_untitled_children_get_their_part_from_the_tree_and_their_rank_from_the_order_of_start() -> None:
    found = only(
        process(10, 1, serve("-tp", "2"), 10),
        process(12, 10, SPAWN, 10),
        process(14, 12, SPAWN, 10),
        process(13, 12, SPAWN, 10),
    )
    assert labels(found) == {10: "APIServer", 12: "EngineCore", 13: "Worker_TP0", 14: "Worker_TP1"}


def test_one_untitled_worker_beside_a_titled_one_is_the_other_rank() -> None:
    found = only(
        process(10, 1, serve("-tp", "2"), 10),
        process(12, 10, "VLLM::EngineCore", 10),
        process(13, 12, "VLLM::Worker_TP0", 10),
        process(14, 12, SPAWN, 10),
    )
    assert labels(found)[14] == "Worker_TP1"


def test_a_zombie_worker_keeps_its_rank_by_order_of_start() -> None:
    dead = process(14, 12, (), 10, comm="VLLM::Worker_TP")
    found = only(
        process(10, 1, serve("-tp", "2"), 10),
        process(12, 10, "VLLM::EngineCore", 10),
        process(13, 12, "VLLM::Worker_TP0", 10),
        dead,
    )
    assert labels(found)[14] == "Worker_TP1"


def test_a_dead_worker_whose_engine_has_died_too_is_the_rank_that_nobody_else_has() -> None:
    for alive, expected in (("VLLM::Worker_TP0", "Worker_TP1"), ("VLLM::Worker_TP1", "Worker_TP0")):
        found = only(
            process(10, 1, serve("-tp", "2"), 10),
            process(13, 1, alive, 10),
            process(14, 1, (), 10, comm="VLLM::Worker_TP"),
        )
        assert labels(found)[14] == expected


def test_a_dead_worker_alone_has_no_rank_that_could_be_told() -> None:
    found = only(process(10, 1, serve("-tp", "2"), 10), process(14, 1, (), 10, comm="VLLM::Worker_TP"))
    assert found.member(14).ranks == {}  # type: ignore[union-attr]


def test_twins_of_two_dense_engines_are_told_apart_by_their_parent() -> None:
    found = only(
        process(10, 1, serve("-tp", "2", "--data-parallel-size", "2"), 10),
        process(11, 10, "VLLM::DPCoordinator", 10),
        process(20, 10, "VLLM::EngineCore_DP0", 10),
        process(21, 20, "VLLM::Worker_TP0", 10),
        process(22, 20, "VLLM::Worker_TP1", 10),
        process(30, 10, "VLLM::EngineCore_DP1", 10),
        process(31, 30, "VLLM::Worker_TP0", 10),
        process(32, 30, "VLLM::Worker_TP1", 10),
        process(40, 10, "VLLM::APIServer_0", 10),
        process(41, 10, "VLLM::APIServer_1", 10),
    )
    assert labels(found)[32] == "EngineCore_DP1/Worker_TP1"
    assert found.member(32).ranks == {"dp": 1, "tp": 1}  # type: ignore[union-attr]
    assert found.members[0].role == "Launcher"
    assert [m.label for m in found.of("APIServer")] == ["APIServer_0", "APIServer_1"]


def test_a_prefix_of_the_titles_changes_nothing() -> None:
    found = only(
        process(10, 1, serve("-tp", "2"), 10),
        process(12, 10, "acme::EngineCore", 10),
        process(13, 12, "acme::Worker_TP0", 10),
    )
    assert labels(found)[13] == "Worker_TP0"


def test_an_engine_left_by_its_server_is_an_orphan_also_under_a_shell() -> None:
    for parent in (process(5, 1, "/sbin/init", comm="init"), process(5, 1, "-bash", comm="bash")):
        found = only(parent, process(12, 5, "VLLM::EngineCore", 10), process(13, 12, "VLLM::Worker_TP0", 10))
        assert found.orphaned
        assert found.roots == (12,)


def test_an_orphan_adopted_by_a_python_supervisor_is_still_an_orphan() -> None:
    supervisor = process(1, 0, ("/usr/bin/python3", "/usr/bin/supervisord"), 1)
    for group in (10, 0):  # pasted tables seldom have process groups
        engine, worker = process(12, 1, "VLLM::EngineCore", group), process(13, 12, "VLLM::Worker_TP0", group)
        assert only(supervisor, engine, worker).orphaned


def test_workers_left_by_a_dead_engine_stay_one_instance() -> None:
    found = only(process(13, 1, "VLLM::Worker_TP0", 10), process(14, 1, "VLLM::Worker_TP1", 10))
    assert labels(found) == {13: "Worker_TP0", 14: "Worker_TP1"}
    assert found.orphaned


def test_two_servers_are_two_instances() -> None:
    trees = [
        (process(pid, 1, serve("--port", str(port)), pid), process(pid + 1, pid, "VLLM::EngineCore", pid))
        for pid, port in ((10, 8000), (20, 8001))
    ]
    found = find_instances([p for tree in trees for p in tree])
    assert [i.roots for i in found] == [(10,), (20,)]


def test_a_script_with_the_llm_class_drives_its_engine() -> None:
    found = only(
        process(9, 1, ("/v/bin/python", "batch.py"), 9),
        process(12, 9, "VLLM::EngineCore", 9),
        process(13, 12, "VLLM::Worker_TP0", 9),
    )
    assert labels(found)[9] == "Driver"
    assert not found.orphaned


def test_a_script_with_the_llm_class_may_be_pid_1_of_a_container() -> None:
    found = only(
        process(1, 0, ("python3", "-m", "huggingfaceserver"), 1),
        process(12, 1, "VLLM::EngineCore", 1),
        process(13, 12, "VLLM::Worker_TP0", 1),
    )
    assert labels(found)[1] == "Driver"
    assert not found.orphaned


def test_a_script_without_multiprocessing_is_the_engine_itself() -> None:
    found = only(
        process(9, 1, ("/v/bin/python", "batch.py"), 9),
        process(13, 9, "VLLM::Worker_TP0", 9),
        process(14, 9, "VLLM::Worker_TP1", 9),
    )
    assert found.member(9).role == "EngineCore"  # type: ignore[union-attr]
    assert [w.pid for w in found.workers_of(9)] == [13, 14]


def test_an_old_script_without_any_title_is_found_by_its_spawned_tree() -> None:
    found = only(
        process(9, 1, ("/v/bin/python", "train.py"), 9),
        process(12, 9, SPAWN, 9),
        process(13, 12, SPAWN, 9),
        process(14, 12, (), 9, comm="python"),
    )
    assert labels(found)[12] == "EngineCore"
    assert labels(found)[13].startswith("Worker")


def test_any_python_with_spawned_children_is_not_vllm() -> None:
    assert not find_instances([process(9, 1, ("/v/bin/python", "train.py"), 9), process(12, 9, SPAWN, 9)])


def test_two_nodes_of_one_job_on_one_host_are_one_instance() -> None:
    nodes = ("-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29501")
    found = only(
        process(10, 1, serve(*nodes, "--node-rank", "0"), 10),
        process(12, 10, "VLLM::EngineCore", 10),
        process(13, 12, "VLLM::Worker_TP0", 10),
        process(20, 1, serve(*nodes, "--node-rank", "1", "--headless"), 20),
        process(21, 20, "VLLM::Worker_TP1", 20),
    )
    assert found.roots == (10, 20)
    assert labels(found)[20] == "Launcher"
    assert [w.pid for w in found.workers_of(12)] == [13, 21]


def test_a_headless_engine_is_no_orphan() -> None:
    dp = ("--data-parallel-size", "2", "--data-parallel-rpc-port", "13345", "--data-parallel-address", "10.0.0.1")
    found = only(
        process(20, 1, serve(*dp, "--headless", "--data-parallel-start-rank", "1"), 20),
        process(21, 20, "VLLM::EngineCore_DP1", 20),
        process(22, 21, "VLLM::Worker", 20),
    )
    assert not found.orphaned
    assert labels(found) == {20: "Launcher", 21: "EngineCore_DP1", 22: "Worker"}


def test_a_forked_child_that_still_shows_the_command_of_its_parent_is_its_engine() -> None:
    found = only(process(10, 1, serve("-tp", "2"), 10), process(12, 10, serve("-tp", "2"), 10))
    assert labels(found) == {10: "APIServer", 12: "EngineCore"}


TITLES = st.sampled_from(
    [
        "VLLM::EngineCore",
        "VLLM::EngineCore_DP1",
        "VLLM::Worker_TP0",
        "VLLM::Worker_TP1",
        "VLLM::Worker",
        "bash",
        "",
        "VLLM::APIServer_0",
    ]
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            TITLES | st.sampled_from([serve(), serve("--headless"), SPAWN, TRACKER]),
            st.integers(0, 12),
        ),
        max_size=12,
    )
)
def test_any_forest_even_one_with_cycles_gives_each_process_to_one_instance_at_most(
    rows: list[tuple[int, str | tuple[str, ...], int]],
) -> None:
    processes = [process(pid, ppid, cmdline, pgid) for pid, (ppid, cmdline, pgid) in enumerate(rows, start=1)]
    found = find_instances(processes)
    pids = [pid for instance in found for pid in instance.pids]
    assert len(pids) == len(set(pids))
    assert set(pids) <= {p.pid for p in processes}


def test_a_forked_child_that_still_has_its_makers_title_is_no_second_one_of_it() -> None:
    found = only(
        process(10, 1, serve("-tp", "2"), 10),
        process(12, 10, "VLLM::EngineCore", 10),
        process(13, 12, "VLLM::Worker_TP0", 10),
        process(14, 12, "VLLM::EngineCore", 10),
        process(15, 13, "VLLM::Worker_TP0", 10),
    )
    assert labels(found) == {
        10: "APIServer",
        12: "EngineCore",
        13: "Worker_TP0",
        14: "Worker_TP1",
        15: "untitled child",
    }

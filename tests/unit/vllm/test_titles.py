from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllmdiag.model.process import Frame
from vllmdiag.vllm.titles import from_label, from_title, identify, role_of_main

PYTHON = "/opt/venv/bin/python3.11"


@pytest.mark.parametrize(
    ("title", "role", "ranks"),
    [
        ("VLLM::EngineCore", "EngineCore", {}),
        ("VLLM::EngineCore_DP3", "EngineCore", {"dp": 3}),
        ("VLLM::Worker", "Worker", {}),
        ("VLLM::Worker_TP1", "Worker", {"tp": 1}),
        (
            "VLLM::Worker_DP1_PP0_PCP1_TP12_DCP2_EP13",
            "Worker",
            {"dp": 1, "pp": 0, "pcp": 1, "tp": 12, "dcp": 2, "ep": 13},
        ),
        ("VLLM::Worker_TP1_DP0", "Worker", {"tp": 1, "dp": 0}),
        ("VLLM::APIServer_1", "APIServer", {"index": 1}),
        ("VLLM::APIServer_DP2", "APIServer", {"dp": 2}),
        ("VLLM::DPCoordinator", "DPCoordinator", {}),
        ("acme::EngineCore_DP0", "EngineCore", {"dp": 0}),
        ("acme::Worker_TP1_EP1", "Worker", {"tp": 1, "ep": 1}),
    ],
)
def test_a_title_names_role_and_ranks(title: str, role: str, ranks: dict[str, int]) -> None:
    identity = identify([title], title[:15])
    assert identity is not None
    assert (identity.role, identity.ranks, identity.known_by) == (role, ranks, "title")
    assert f"{identity.prefix}::{identity.name}" == title


@pytest.mark.parametrize("padding", ["\0" * 9, "   ", " \0 \0"])
def test_a_title_is_read_through_its_padding(padding: str) -> None:
    padded = ("VLLM::Worker_TP1" + padding).split("\0")
    identity = identify(padded)
    assert identity is not None
    assert identity.name == "Worker_TP1"


@pytest.mark.parametrize(
    ("comm", "role", "name"),
    [
        ("VLLM::EngineCor", "EngineCore", "EngineCore"),
        ("VLLM::Worker_TP", "Worker", "Worker"),
        ("VLLM::Worker", "Worker", "Worker"),
        ("VLLM::DPCoordin", "DPCoordinator", "DPCoordinator"),
        ("VLLM::APIServer", "APIServer", "APIServer"),
        ("a::Worker_TP1", "Worker", "Worker_TP1"),
        ("a::Wo_prefix::W", None, None),
        ("acme::Worker_TP", "Worker", "Worker"),
        ("p::Worker_DP0_T", "Worker", "Worker_DP0"),
        ("vllm", "APIServer", "APIServer"),
        ("python3.11", None, None),
        ("", None, None),
    ],
)
def test_a_cut_comm_serves_where_the_command_line_is_gone(comm: str, role: str | None, name: str | None) -> None:
    identity = identify((), comm)
    assert (identity and identity.role, identity and identity.name) == (role, name)


def test_a_cut_rank_is_not_taken_for_a_whole_one() -> None:
    cut = "ab::Worker_TP12"  # of ab::Worker_TP128, say
    identity = identify((), cut)
    assert identity is not None
    assert identity.ranks == {}


def test_the_comm_never_overrules_a_command_line() -> None:
    assert identify(["/usr/bin/vim", "notes.txt"], "VLLM::EngineCor") is None


SERVE = ["serve", "meta/model", "--tensor-parallel-size", "2", "--port=8011"]


@pytest.mark.parametrize(
    "argv",
    [
        [PYTHON, "/opt/venv/bin/vllm", *SERVE],
        ["/opt/venv/bin/vllm", *SERVE],
        ["vllm", *SERVE],
        [PYTHON, "-u", "-X", "faulthandler", "/opt/venv/bin/vllm", *SERVE],
        ["python", "-m", "vllm.entrypoints.cli.main", *SERVE],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "meta/model", "-tp", "2", "--port", "8011"],
        [PYTHON, "/src/vllm/entrypoints/openai/api_server.py", "--model=meta/model", "-tp=2", "--port", "8011"],
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_a_server_is_known_by_its_command_line(argv: list[str], joined: bool) -> None:
    identity = identify([" ".join(argv)] if joined else argv, "vllm")
    assert identity is not None
    assert (identity.role, identity.known_by, identity.prefix) == ("APIServer", "command line", "")
    options = identity.options
    assert options is not None
    assert (options.model, options.tensor_parallel_size, options.port) == ("meta/model", 2, 8011)


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-c", "vllm serve meta/model"],
        ["/bin/sh", "/opt/venv/bin/vllm", "serve", "m"],
        ["timeout", "60", "vllm", "serve", "m"],
        ["nohup", "vllm", "serve", "m"],
        ["uv", "run", "vllm", "serve", "m"],
        ["grep", "vllm", "serve"],
        ["grep", "VLLM::EngineCore"],
        ["pgrep", "-f", "VLLM::Worker_TP0"],
        ["py-spy", "dump", "--pid", "7"],
        ["vim", "/opt/vllm/serve"],
        ["vllm", "bench", "serve"],
        ["vllm", "chat"],
        ["vllm"],
        [PYTHON, "-m", "vllm.entrypoints.openai.run_batch"],
        [PYTHON, "-m", "vllm.entrypoints.cli.main", "bench"],
        [PYTHON, "-m", "http.server"],
        [PYTHON, "-c", "print('from multiprocessing.spawn import spawn_main')"],
        [PYTHON, "my_script.py", "serve"],
        [PYTHON],
        ["ray::IDLE"],
        ["some::Other_TP1"],
        ["/x/VLLM::Worker_TP1"],
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_a_command_that_only_mentions_vllm_is_nobody(argv: list[str], joined: bool) -> None:
    assert identify([" ".join(argv)] if joined else argv, "python3") is None


SPAWNED = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=33, pipe_handle=35)"


@pytest.mark.parametrize(
    "argv",
    [
        [PYTHON, "-B", "-c", SPAWNED, "--multiprocessing-fork"],
        [f"{PYTHON} -B -c {SPAWNED} --multiprocessing-fork"],
        [PYTHON, "-c", "from multiprocessing.forkserver import main; main(5, 6, ['__main__'], **{})"],
    ],
)
def test_an_untitled_child_of_multiprocessing_is_starting(argv: list[str]) -> None:
    identity = identify(argv, "python3.11")
    assert identity is not None
    assert (identity.role, identity.starting) == ("Child", True)


def test_the_resource_tracker_is_known() -> None:
    identity = identify([PYTHON, "-B", "-c", "from multiprocessing.resource_tracker import main;main(32)"])
    assert identity is not None
    assert identity.role == "ResourceTracker"
    assert not identity.starting


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::RayWorkerWrapper", "RayWorker"),
        ("ray::RayWorkerWrapper.execute_method", "RayWorker"),
        ("ray::RayWorkerProc", "RayWorker"),
        ("ray::DPMoEEngineCoreActor.run", "EngineCore"),
    ],
)
def test_an_actor_of_ray_is_known(title: str, role: str) -> None:
    identity = identify([title], title[:15])
    assert identity is not None
    assert identity.role == role


@pytest.mark.parametrize(
    ("label", "role", "ranks"),
    [
        ("Worker_TP1", "Worker", {"tp": 1}),
        ("(Worker_TP1 pid=30199)", "Worker", {"tp": 1}),
        ("EngineCore_0", "EngineCore", {"index": 0}),
        ("EngineCore_DP0", "EngineCore", {"dp": 0}),
        ("VllmWorker-1", "Worker", {"index": 1}),
        ("VllmWorker rank=1 pid=77", "Worker", {"index": 1}),
        ("VllmWorkerProcess", "Worker", {}),
        ("ApiServer_0", "APIServer", {"index": 0}),
        ("VLLM_DP_Coordinator", "DPCoordinator", {}),
    ],
)
def test_the_names_of_logs_are_known(label: str, role: str, ranks: dict[str, int]) -> None:
    identity = from_label(label)
    assert identity is not None
    assert (identity.role, identity.ranks) == (role, ranks)


def test_options_are_read_as_argparse_would() -> None:
    identity = identify(
        [
            "vllm",
            "serve",
            "--headless",
            "--data_parallel_size=4",
            "-dpl",
            "2",
            "-dpr",
            "2",
            "-dpa",
            "10.0.0.1",
            "-dpp",
            "13345",
            "-pp",
            "2",
            "-tp",
            "4",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--master-addr",
            "10.0.0.9",
            "--distributed-executor-backend",
            "mp",
            "--enable-expert-parallel",
            "--root-path=/v",
            "--uds",
            "/run/v.sock",
        ]
    )
    assert identity is not None
    assert identity.options is not None
    options = identity.options
    assert identity.headless
    assert options.headless
    assert (options.data_parallel_size, options.data_parallel_size_local, options.data_parallel_start_rank) == (4, 2, 2)
    assert (options.data_parallel_address, options.data_parallel_rpc_port) == ("10.0.0.1", 13345)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == (2, 1, "10.0.0.9", None)
    assert (options.executor_backend, options.enable_expert_parallel) == ("mp", True)
    assert (options.root_path, options.uds, options.port, options.model) == ("/v", "/run/v.sock", 8000, None)
    assert options.world_size == 8
    assert not options.several_servers


@pytest.mark.parametrize("flag", ["-dpn 1", "--data-parallel-hybrid-lb", "--data-parallel-external-lb", "-dpm"])
def test_servers_of_one_job_are_told_by_their_options(flag: str) -> None:
    identity = identify(["vllm", "serve", "m", "-dp", "2", *flag.split()])
    assert identity is not None
    assert identity.options is not None
    assert identity.options.several_servers


def test_a_value_that_makes_no_sense_is_passed_over() -> None:
    identity = identify(["vllm", "serve", "m", "--port", "eight", "-tp", "two", "-dp=2", "--master-port"])
    assert identity is not None
    assert identity.options is not None
    assert (identity.options.port, identity.options.tensor_parallel_size, identity.options.data_parallel_size) == (
        8000,
        1,
        2,
    )


@given(st.lists(st.text()), st.text(max_size=15))
@example(["\x1f"], "")
def test_any_command_line_is_accepted(cmdline: list[str], comm: str) -> None:
    identify(cmdline, comm)


@given(st.lists(st.sampled_from(["-tp", "2", "--port", "--headless", "=", "-", "--", "--model", "x", "--dp=a"])))
def test_any_options_are_accepted(arguments: list[str]) -> None:
    identity = identify(["vllm", "serve", *arguments])
    assert identity is not None
    assert identity.role == "APIServer"


def test_a_title_is_one_word_with_a_known_name() -> None:
    assert from_title("VLLM::Worker_TP1 --extra") is None
    assert from_title("::Worker") is None
    assert from_title("VLLM::Workers") is None


def _main(*names: str) -> list[Frame]:
    files = {"run_engine_core": "vllm/v1/engine/core.py", "worker_main": "vllm/v1/executor/multiproc_executor.py"}
    return [Frame(name=name, file=files.get(name, "x.py"), line=1) for name in names]


def test_a_main_thread_tells_its_role_by_its_own_main_function() -> None:
    assert role_of_main(_main("get_response", "run_engine_core", "spawn_main")) == "EngineCore"
    # A worker that was forked has the frames of its engine below its own.
    assert role_of_main(_main("dequeue", "worker_main", "_launch", "run_engine_core")) == "Worker"
    assert role_of_main(_main("poll", "run_server")) == ""
    assert role_of_main([Frame(name="worker_main", file="other/pool.py", line=1)]) == ""

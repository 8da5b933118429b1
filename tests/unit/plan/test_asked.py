"""A topology is read from what vLLM itself is given: a command, a YAML file, the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllmdiag.model.errors import BadDataError, UsageError
from vllmdiag.plan.asked import options_of, topology_of
from vllmdiag.plan.host import effective_nofile, limits_here


def test_a_command_line_is_read_as_vllm_reads_it() -> None:
    topology = topology_of(options_of("vllm serve org/model -tp 8 -pp 2 --nnodes 2 --port 9000"))
    assert (topology.nodes, topology.gpus_per_node, topology.tp, topology.pp, topology.port) == (2, 8, 8, 2, 9000)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: org/model\ntensor-parallel-size: 4\ndata_parallel_size: 2\nenable-expert-parallel: true\n")
    topology = topology_of(options_of("serve --tensor-parallel-size 2", file))
    assert (topology.tp, topology.dp, topology.ep) == (2, 2, True)
    assert topology_of(options_of(f"vllm serve --config {file}")).tp == 4


def test_api_servers_that_are_not_given_are_left_to_vllm() -> None:
    assert topology_of(options_of("serve m -dp 4")).api_servers is None
    assert topology_of(options_of("serve m -dp 4 --api-server-count 1")).api_servers == 1


def test_the_environment_sets_the_slots_and_the_directory_of_the_sockets() -> None:
    environ = {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "24", "VLLM_RPC_BASE_PATH": "/run/vllm"}
    topology = topology_of(options_of("serve m"), environ)
    assert (topology.chunk_mib, topology.ipc_dir) == (24, "/run/vllm")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "plain words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(text)
    with pytest.raises(BadDataError):
        options_of("", file)


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        options_of("", tmp_path / "none.yaml")


def test_one_of_several_servers_behind_a_balancer_is_not_planned_as_if_it_were_all() -> None:
    with pytest.raises(UsageError):
        topology_of(options_of("serve m --data-parallel-size 4 --data-parallel-rank 1"))


def test_descriptors_are_those_that_vllm_raises_its_limit_to() -> None:
    assert effective_nofile(1024, 1 << 20) == 65535
    assert effective_nofile(1024, 4096) == 4096
    assert effective_nofile(100_000, 1 << 20) == 100_000
    assert effective_nofile(-1, -1) is None


def test_the_limits_of_this_machine_say_where_they_were_read() -> None:
    here = limits_here()
    assert {"nofile", "shm", "pids", "ports"} <= set(here)
    assert all(source for _, source in here.values())

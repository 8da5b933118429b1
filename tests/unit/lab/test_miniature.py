"""The parts of the miniature: collectives wait for all, titles are what the kernel shows, messages come back whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.lab import procs, switches
from vllmdiag.lab.vllm.config import VllmConfig, parse
from vllmdiag.lab.vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllmdiag.lab.vllm.distributed.mesh import Mesh
from vllmdiag.lab.vllm.v1.figures import Figures
from vllmdiag.lab.vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmdiag.vllm.titles import identify

RANKS = 3


@pytest.fixture
def meshes() -> Iterator[list[Mesh]]:
    """One end for each rank, met."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        store = probe.getsockname()
    with ThreadPoolExecutor(RANKS) as pool:
        made = list(pool.map(lambda rank: Mesh(rank, RANKS, store, "127.0.0.1"), range(RANKS)))
    yield made
    for mesh in made:
        mesh.close()


def groups(meshes: list[Mesh]) -> list[CpuCommunicator]:
    return [CpuCommunicator(mesh, "world", list(range(RANKS))) for mesh in meshes]


def test_an_all_reduce_gives_every_rank_the_sum_again_and_again(meshes: list[Mesh]) -> None:
    members = groups(meshes)
    with ThreadPoolExecutor(RANKS) as pool:
        for step in range(5):
            sums = list(pool.map(CpuCommunicator.all_reduce, members, range(step, step + RANKS)))
            assert sums == [3 + RANKS * step] * RANKS


def test_a_collective_waits_for_a_rank_that_is_in_another_one(meshes: list[Mesh]) -> None:
    members = groups(meshes)
    done: list[int] = []

    def enter(rank: int, operation: Callable[[int], object]) -> threading.Thread:
        def work() -> None:
            operation(rank)
            done.append(rank)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    waiting = [enter(0, members[0].all_reduce), enter(1, members[1].all_reduce)]
    # rank 2 enters another collective, which the others enter only after theirs
    gathering = enter(2, members[2].all_gather)
    gathering.join(0.3)
    assert done == []
    # what the first two wait for comes in the end, and what the third waits for with it
    for rank in range(2):
        meshes[2].send("world all_reduce 1", rank, 2)
    for thread in waiting:
        thread.join()
    assert sorted(done) == [0, 1]
    others = [enter(0, members[0].all_gather), enter(1, members[1].all_gather)]
    for thread in (*others, gathering):
        thread.join()
    assert len(done) == 5


def test_a_title_is_what_the_kernel_shows_and_what_the_table_of_titles_knows() -> None:
    code = (
        "import sys\nfrom vllmdiag.lab.vllm.title import set_process_title\n"
        "set_process_title('Worker', 'TP1')\nprint('titled', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as titled:
        assert titled.stdout is not None
        titled.stdout.readline()
        found = procs.read(titled.pid)
        comm = Path(f"/proc/{titled.pid}/comm").read_text().strip()
        titled.communicate()
    assert found is not None
    assert (found.title, comm) == ("VLLM::Worker_TP1", "VLLM::Worker_TP")
    known = identify((found.title,), comm)
    assert known is not None
    assert (known.role, known.ranks) == ("Worker", {"tp": 1})


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200))
def test_a_message_comes_back_whole_and_long_token_lists_travel_beside_it(value: object, tokens: list[int]) -> None:
    frames = MsgpackEncoder().encode({"value": value, "tokens": array("i", tokens)})
    back = MsgpackDecoder().decode(frames)
    assert back["value"] == value
    assert list(back["tokens"]) == tokens
    assert len(frames) == (1 if len(tokens) * 4 < 256 else 2)


def test_figures_of_several_servers_add_up_and_do_not_mix() -> None:
    values = [0] * Figures.size(2, 3)
    first, second = (Figures(values, index, 2, 3) for index in range(2))
    first.add("running", 1, 2)
    second.add("running", 1, 3)
    second.add("finished", 2, 1)
    assert first.totals("running") == second.totals("running") == {0: 0, 1: 5, 2: 0}
    assert first.totals("finished") == {0: 0, 1: 0, 2: 1}
    assert first.totals("generated") == {0: 0, 1: 0, 2: 0}


def config(*words: str) -> VllmConfig:
    return parse(["m", *words])


def test_ranks_are_numbered_stage_by_stage_and_titled_by_the_groups_they_are_in() -> None:
    four = config("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    assert [four.worker_suffix(rank) for rank in range(4)] == ["PP0_TP0", "PP0_TP1", "PP1_TP0", "PP1_TP1"]
    assert four.output_rank == 2
    assert config().worker_suffix(0) == ""
    second = config("--tensor-parallel-size", "4", "--nnodes", "2", "--node-rank", "1", "--headless")
    assert list(second.local_ranks) == [2, 3]


def test_a_switch_is_on_for_everybody_or_for_the_one_it_names(tmp_path: Path) -> None:
    switches.turn_on("all", work=tmp_path)
    switches.turn_on("one", "1", tmp_path)
    assert switches.is_on("all", "0", tmp_path)
    assert switches.is_on("one", "1", tmp_path)
    assert not switches.is_on("one", "0", tmp_path)
    switches.turn_off("one", tmp_path)
    assert not switches.is_on("one", "1", tmp_path)
    switches.turn_off("never on", tmp_path)


def test_a_process_knows_the_segments_it_holds_by_name() -> None:
    assert procs.segments(os.getpid()) == set()

"""Stacks of many ranks as one tree: the rank that parts from the others is named, however many there are."""

from __future__ import annotations

from vllmdiag.diagnosis.merged_stacks import merged
from vllmdiag.model.process import Frame
from vllmdiag.model.stacks import MergedStacks, StackNode
from vllmdiag.model.view import InstanceView, StackView
from vllmdiag.render.page import Style
from vllmdiag.render.stacks import merged_text

LOOP = (Frame(name="worker_main", file="vllm/v1/executor/multiproc_executor.py", line=879),)
STEP = Frame(name="execute_model", file="vllm/v1/worker/gpu_worker.py", line=612)
EXPERTS = Frame(name="forward", file="vllm/model_executor/models/minimax_m2.py", line=136)
ATTENTION = Frame(name="forward", file="vllm/model_executor/models/minimax_m2.py", line=245)
REDUCE = Frame(name="all_reduce", file="vllm/distributed/parallel_state.py", line=513)


def stack(label: str, *inner: Frame, thread: str = "MainThread", meaning: str = "") -> StackView:
    """A stack, its frames given from the outermost on."""
    return StackView(
        pid=1, label=label, thread=thread, main=thread == "MainThread", frames=(*LOOP, *inner)[::-1], meaning=meaning
    )


def ranks(n: int, odd: int) -> tuple[StackView, ...]:
    """Ranks of which one is elsewhere."""
    return tuple(
        stack(f"Worker_TP{i}", STEP, ATTENTION)
        if i == odd
        else stack(f"Worker_TP{i}", STEP, EXPERTS, REDUCE, meaning="collective among the workers of a group")
        for i in range(n)
    )


def trees(*stacks: StackView) -> MergedStacks:
    return merged(InstanceView(stacks=stacks))


def nodes(parts: tuple[StackNode, ...]) -> int:
    return sum(1 + nodes(node.children) for node in parts)


def test_the_rank_that_parts_from_the_others_is_named_and_comes_first() -> None:
    (thread,) = trees(*ranks(8, odd=3)).threads
    assert thread.odd == ("Worker_TP3",)
    (root,) = thread.tree.nodes
    assert root.children[0].labels == ("Worker_TP3",)
    assert [frame.name for frame in root.frames] == ["worker_main", "execute_model"]


def test_where_half_of_them_go_one_way_nobody_is_odd() -> None:
    assert trees(*ranks(2, odd=1)).threads[0].odd == ()


def test_processes_of_other_roles_are_not_odd_for_being_what_they_are() -> None:
    engine = StackView(pid=9, label="EngineCore", thread="MainThread", main=True, frames=(Frame(name="x", file="y"),))
    assert trees(engine, *ranks(8, odd=3)).threads[0].odd == ("Worker_TP3",)


def test_384_ranks_are_one_short_tree_with_folded_ranks() -> None:
    found = trees(*ranks(384, odd=201))
    assert nodes(found.threads[0].tree.nodes) == 3
    text = merged_text(found, Style())
    assert "Worker_TP201 parts from the others" in text
    assert "Worker_TP0-200,202-383 (383)" in text
    assert len(text.splitlines()) < 20


def test_threads_that_rest_are_left_out_and_counted_unless_all_are_asked_for() -> None:
    resting = stack("Worker_TP0", thread="Thread-9")
    assert trees(resting).left_out == 1
    assert trees(resting).threads == ()
    assert merged(InstanceView(stacks=(resting,)), every_thread=True).left_out == 0

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.diagnosis.stack_tree import MAIN, stack_trees
from vllmdiag.model.process import Frame
from vllmdiag.model.stacks import StackNode
from vllmdiag.model.view import StackView


def _stack(rank: int, *outermost_first: str, main: bool = True, meaning: str = "") -> StackView:
    frames = tuple(Frame(name=name, file="f.py", line=1) for name in reversed(outermost_first))
    thread = "MainThread" if main else "io"
    return StackView(pid=300 + rank, label=f"Worker_TP{rank}", thread=thread, main=main, frames=frames, meaning=meaning)


def _ways(node: StackNode, before: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """The longest way down the tree for each label."""
    here = (*before, *(frame.name for frame in node.frames))
    found = dict.fromkeys(node.labels, here)
    for child in node.children:
        found |= _ways(child, here)
    return found


def test_what_all_have_stands_once_and_the_odd_one_comes_first_where_they_part() -> None:
    stacks = [_stack(k, "run", "loop", "all_reduce", meaning="in a collective") for k in range(7)]
    (tree,) = stack_trees([*stacks, _stack(7, "run", "loop", "dequeue", meaning="idle")])
    (node,) = tree.nodes
    assert (tree.thread, [frame.name for frame in node.frames], len(node.labels)) == (MAIN, ["run", "loop"], 8)
    odd, rest = node.children
    assert (odd.labels, odd.meaning) == (("Worker_TP7",), "idle")
    assert (len(rest.labels), rest.meaning) == (7, "in a collective")


def test_threads_of_other_names_have_trees_of_their_own_and_main_threads_come_first() -> None:
    trees = stack_trees([_stack(0, "io", main=False), _stack(0, "run"), _stack(1)])
    assert [(tree.thread, tree.main, tree.labels) for tree in trees] == [
        (MAIN, True, ("Worker_TP0",)),
        ("io", False, ("Worker_TP0",)),
    ]


def test_a_stack_that_is_the_beginning_of_another_ends_where_the_other_goes_on() -> None:
    (tree,) = stack_trees([_stack(0, "run", meaning="early"), _stack(1, "run", "step")])
    assert tree.nodes[0].meaning == "early"
    assert [child.labels for child in tree.nodes[0].children] == [("Worker_TP1",)]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), min_size=1, max_size=12))
def test_every_stack_is_found_again_in_the_tree(stacks: list[list[str]]) -> None:
    (tree,) = stack_trees([_stack(k, *names) for k, names in enumerate(stacks)])
    ways: dict[str, tuple[str, ...]] = {}
    for node in tree.nodes:
        ways |= _ways(node)
    assert ways == {f"Worker_TP{k}": tuple(names) for k, names in enumerate(stacks)}


def test_partings_without_end_do_not_break_it() -> None:
    n = sys.getrecursionlimit()
    (tree,) = stack_trees([_stack(k, *(["deeper"] * k), "end") for k in range(n)])
    assert len(tree.labels) == n


def test_a_stack_of_a_thousand_frames_is_one_node() -> None:
    (tree,) = stack_trees([_stack(0, *map(str, range(5000)))])
    assert len(tree.nodes[0].frames) == 5000

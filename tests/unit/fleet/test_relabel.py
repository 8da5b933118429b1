"""Nodes with the same pids, inodes and loopback addresses stay apart in one snapshot, and find back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.fleet.relabel import merge
from vllmdiag.model.nodes import fold_nodes
from vllmdiag.model.snapshot import KernelLine, Snapshot

from .nodes import state


@pytest.mark.parametrize("name", ["idle", "worker-stopped", "ring-full", "api-loop-blocked"])
def test_one_node_merged_alone_is_judged_as_it_is(name: str) -> None:
    moved = merge([("a", state(name))])
    there, here = moved.back(diagnose(moved.snapshot)).verdict, diagnose(state(name)).verdict
    assert (there.cause, there.summary, there.evidence, there.next) == (
        here.cause,
        here.summary,
        here.evidence,
        here.next,
    )
    assert there.subject.pid == here.subject.pid
    assert there.subject.node == "a"


def test_copies_of_one_node_share_nothing() -> None:
    seen = state("serving")
    merged = merge([("a", seen), ("b", seen), ("c", seen)]).snapshot

    def distinct(values: list[object], times: int = 3) -> None:
        assert len(set(values)) == len(values) == times * (len(values) // times)

    distinct([p.pid for p in merged.processes])
    distinct([s.key for s in merged.segments])
    distinct([s.inode for s in merged.sockets if s.inode])
    tcp = [(s.local, s.remote) for s in merged.sockets if s.family == "tcp" and s.state == "ESTAB"]
    assert len(tcp) == len(set(tcp))
    assert set(merged.target_pids) <= {p.pid for p in merged.processes}


def test_every_reference_leads_to_a_process_of_the_same_node() -> None:
    seen = state("serving")
    moved = merge([("a", seen), ("b", seen)])
    for segment in moved.snapshot.segments:
        assert len({moved.origin[h.pid][0] for h in segment.holders if h.pid in moved.origin}) <= 1
    for process in moved.snapshot.processes:
        if process.ppid in moved.origin:
            assert moved.origin[process.ppid][0] == moved.origin[process.pid][0]


def test_pids_in_kernel_lines_go_along() -> None:
    seen = state("idle")
    pid = seen.target_pids[0]
    line = KernelLine(t=1.0, text=f"Out of memory: Killed process {pid} (VLLM::Worker), 79 left")
    moved = merge([("a", seen), ("b", msgspec.structs.replace(seen, kernel_lines=(line,)))])
    (text,) = [k.text for k in moved.snapshot.kernel_lines]
    assert moved.text(text) == line.text
    assert str(pid) not in text.split()


@given(st.lists(st.integers(1, 4_194_304), min_size=1, max_size=4, unique=True), st.integers(1, 60))
def test_whatever_the_pids_are_they_find_back(pids: list[int], nodes: int) -> None:
    base = state("idle")
    processes = tuple(msgspec.structs.replace(base.processes[0], pid=pid, ppid=0) for pid in pids)
    seen: Snapshot = msgspec.structs.replace(base, processes=processes, target_pids=tuple(pids))
    moved = merge([(f"n{k}", seen) for k in range(nodes)])
    assert len(moved.origin) == nodes * len(pids)
    assert {moved.origin[p.pid] for p in moved.snapshot.processes} == {
        (f"n{k}", pid) for k in range(nodes) for pid in pids
    }


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["a"], "a"),
        (["node01"], "node01"),
        (["node01", "node02", "node03", "node07"], "node[01-03,07]"),
        (["node8", "node9", "node10"], "node[8-10]"),
        (["gpu1.site", "gpu2.site", "login"], "gpu[1-2].site,login"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)
def test_names_fold_as_node_sets_are_written(names: list[str], folded: str) -> None:
    assert fold_nodes(names) == folded


@given(
    st.lists(
        st.builds(
            lambda head, n, width: f"{head}{n:0{width}}",
            st.sampled_from(["n", "gpu-"]),
            st.integers(0, 120),
            st.just(3),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_clustershell_reads_what_was_folded(names: list[str]) -> None:
    from ClusterShell.NodeSet import NodeSet

    assert set(NodeSet(fold_nodes(names))) == set(names)

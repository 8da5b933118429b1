"""Forty-eight nodes, one fault: the right node, rank and cause; silent, young and strange nodes are evidence."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.unit.diagnosis import scenario
from vllmdiag.fleet.jobs import jobs_of
from vllmdiag.fleet.judge import judge
from vllmdiag.model.fleet import FleetDiagnosis, NodeReport
from vllmdiag.model.snapshot import Snapshot

from .nodes import TOOL, aged, blind, cut_off, halves, names, placed, replicas, report, state
from .record import EIGHT

FAULTS = {
    "worker-stopped": ("process-stopped", "Worker_TP1"),
    "engine-stopped": ("process-stopped", "EngineCore"),
    "api-stopped": ("process-stopped", "APIServer"),
    "worker-killed": ("worker-dead", "Worker_TP1"),
    "ring-full": ("ring-full-slow-reader", "Worker_TP1"),
    "lost-message": ("lost-message", "EngineCore"),
    "worker-busy": ("worker-busy", "Worker_TP1"),
    "input-thread-stuck": ("input-thread-stuck", "EngineCore"),
    "input-thread-dead": ("input-thread-dead", "EngineCore"),
    "collective-divergence": ("collective-divergence", "Worker_TP0"),
    "api-loop-blocked": ("api-loop-blocked", "APIServer"),
}
SILENT = NodeReport(node="b", outcome="silent", problem="no answer within 30 s")


def at(fleet: FleetDiagnosis) -> tuple[str, str | None, str]:
    """Cause, node and label of the verdict."""
    subject = fleet.verdict.subject
    return fleet.verdict.cause, subject.node, subject.label


def test_every_recorded_fault_is_tried() -> None:
    assert set(FAULTS) == set(EIGHT) - {"idle", "serving"}


@pytest.mark.parametrize(("fault", "where"), list(zip(FAULTS, ["node001", "node048", *names(48)[4::4]], strict=False)))
def test_one_fault_on_one_of_48_nodes_is_named_with_node_rank_and_cause(fault: str, where: str) -> None:
    cause, label = FAULTS[fault]
    fleet = judge(replicas(48, where, fault), "files", TOOL)
    assert at(fleet) == (cause, where, label)
    assert [n.node for n in fleet.nodes if n.status != "ok"] == [where]
    assert [j.verdict.status for j in fleet.jobs[1:]] == ["ok"] * 47
    assert fleet.jobs[0].nodes == (where,)


@pytest.mark.parametrize("healthy", ["idle", "serving"])
def test_48_healthy_servers_are_healthy(healthy: str) -> None:
    fleet = judge([report(node, state(healthy)) for node in names(48)])
    assert (fleet.verdict.status, fleet.verdict.cause) == ("ok", healthy)
    assert len(fleet.jobs) == 48


def test_the_order_in_which_nodes_answer_changes_nothing() -> None:
    reports = replicas(12, "node007", "worker-stopped")
    shuffled = random.Random(7).sample(reports, len(reports))
    one, other = judge(reports), judge(shuffled)
    assert one.verdict == other.verdict
    assert one.jobs == other.jobs


def test_of_two_servers_with_faults_the_critical_one_comes_first() -> None:
    reports = replicas(6, "node002", "worker-busy")
    reports[4] = report("node005", state("worker-stopped"))
    fleet = judge(reports)
    assert at(fleet) == ("process-stopped", "node005", "Worker_TP1")
    assert [j.verdict.cause for j in fleet.jobs[:2]] == ["process-stopped", "worker-busy"]


def test_several_servers_on_one_node_are_judged_each_by_itself() -> None:
    fleet = judge([report("a", state("serving"), state("worker-stopped"))])
    assert at(fleet) == ("process-stopped", "a", "Worker_TP1")
    assert len(fleet.jobs) == 2


# -- an engine over two nodes ------------------------------------------------------------------------------------------


def test_ranks_on_two_nodes_are_one_engine_and_the_stopped_one_is_on_its_node() -> None:
    head, follower = halves("worker-stopped")
    fleet = judge([report("a", head), report("b", follower)])
    assert at(fleet) == ("process-stopped", "b", "Worker_TP1")
    chain = [(link.subject.label, link.subject.node) for link in fleet.verdict.chain]
    assert chain == [
        ("client", None),
        ("APIServer", "a"),
        ("EngineCore", "a"),
        ("Worker_TP0", "a"),
        ("Worker_TP1", "b"),
    ]
    pid = next(p.pid for p in follower.processes if p.title.endswith("Worker_TP1"))
    assert fleet.verdict.subject.pid == pid
    assert fleet.verdict.next[0].command == f"kill -CONT {pid}"
    assert [j.nodes for j in fleet.jobs] == [("a", "b")]


def test_a_reader_on_another_node_is_seen_with_the_bytes_that_it_has_not_read() -> None:
    fleet = judge([report(node, half) for node, half in zip("ab", halves("worker-stopped"), strict=True)])
    assert any("not read on" in fact and "Worker_TP1" in fact for fact in fleet.verdict.evidence)


def test_an_idle_engine_over_two_nodes_is_idle_and_nobody_is_missing() -> None:
    fleet = judge([report(node, half) for node, half in zip("ab", halves("idle"), strict=True)])
    assert (fleet.verdict.status, fleet.verdict.cause) == ("ok", "idle")
    assert fleet.missing == ()


def test_24_pairs_of_nodes_with_the_same_pids_do_not_mix() -> None:
    reports = []
    for k in range(24):
        addresses = (f"10.0.{k}.1", f"10.0.{k}.2")
        pair = halves("worker-stopped" if k == 13 else "idle", addresses)
        reports += [report(f"a{k:02}", pair[0]), report(f"b{k:02}", pair[1])]
    fleet = judge(reports)
    assert at(fleet) == ("process-stopped", "b13", "Worker_TP1")
    assert [len(job.nodes) for job in fleet.jobs] == [2] * 24
    assert sum(job.verdict.status == "ok" for job in fleet.jobs) == 23


# -- nodes that do not answer ------------------------------------------------------------------------------------------


def test_a_node_that_others_wait_for_and_that_does_not_answer_is_the_root() -> None:
    head, _ = halves("worker-stopped")
    fleet = judge([report("a", head), SILENT])
    assert at(fleet) == ("node-silent", "b", "b")
    assert fleet.verdict.status == "critical"
    assert "ping -c 3 b" in {step.command for step in fleet.verdict.next}
    assert any("30 s" in fact for fact in fleet.verdict.evidence)


def test_a_silent_node_that_nobody_waits_for_is_unknown_and_the_fleet_not_healthy() -> None:
    fleet = judge([report("a", state("serving")), SILENT])
    assert (fleet.verdict.status, fleet.verdict.cause) == ("unknown", "unknown")
    assert "b" in fleet.verdict.summary
    assert {n.node: n.status for n in fleet.nodes} == {"a": "ok", "b": "unknown"}
    idle, _ = halves("idle")
    assert judge([report("a", idle), SILENT]).verdict.cause == "unknown"


def test_a_fault_on_a_node_that_answered_comes_before_one_that_did_not() -> None:
    _, follower = halves("worker-stopped")
    silent = msgspec.structs.replace(SILENT, node="a")
    assert at(judge([silent, report("b", follower)])) == ("process-stopped", "b", "Worker_TP1")


def test_nodes_of_a_job_that_nobody_asked_are_named_as_a_hole() -> None:
    head, _ = halves("idle")
    (hole,) = judge([report("a", head)]).missing
    assert "1 of 2 nodes" in hole.what


def test_no_node_without_an_answer_hides_what_the_others_show() -> None:
    odd = [
        SILENT,
        NodeReport(node="c", outcome="refused", problem="exit code 255: Connection refused"),
        NodeReport(node="d", outcome="garbage", problem="what came is no answer of vllmdiag"),
        NodeReport(node="e", outcome="empty"),
    ]
    fleet = judge([report("a", state("worker-stopped")), *odd])
    assert at(fleet) == ("process-stopped", "a", "Worker_TP1")
    assert [(n.node, n.outcome) for n in fleet.nodes[1:]] == [(r.node, r.outcome) for r in odd]
    assert [n.status for n in fleet.nodes] == ["critical", "unknown", "unknown", "unknown", "ok"]


def test_nobody_at_all_is_no_healthy_fleet() -> None:
    assert judge([]).verdict.status == "unknown"
    assert judge([NodeReport(node="a", outcome="empty")]).verdict.status == "unknown"


# -- a node that began anew --------------------------------------------------------------------------------------------


def restarted(young: Snapshot) -> FleetDiagnosis:
    head, _ = halves("worker-stopped")
    return judge([report("a", aged(cut_off(head), 7200)), report("b", young)])


def test_the_node_that_began_anew_is_the_root() -> None:
    _, follower = halves("idle")
    fleet = restarted(aged(cut_off(follower), 40))
    assert at(fleet) == ("node-restarted", "b", "b")
    assert any("no connection stands" in fact for fact in fleet.verdict.evidence)


def test_a_young_node_that_is_connected_has_not_begun_anew() -> None:
    head, follower = halves("idle")
    stalled, _ = halves("worker-stopped")
    young = msgspec.structs.replace(aged(follower, 40), sockets=follower.sockets)
    old = msgspec.structs.replace(aged(stalled, 7200), sockets=head.sockets)
    assert judge([report("a", old), report("b", young)]).verdict.cause != "node-restarted"


def test_nothing_is_said_of_connections_that_could_not_be_seen() -> None:
    _, follower = halves("idle")
    assert restarted(blind(aged(cut_off(follower), 40))).verdict.cause != "node-restarted"


def test_nodes_of_one_age_have_not_begun_anew() -> None:
    _, follower = halves("idle")
    assert restarted(aged(cut_off(follower), 7170)).verdict.cause != "node-restarted"


# -- data parallelism over nodes ---------------------------------------------------------------------------------------

_DP = ("--data-parallel-size", "3", "--data-parallel-size-local", "1", "--data-parallel-rpc-port", "29550")


def dp_nodes(*, head_address: tuple[str, ...] = ("--data-parallel-address", "10.0.0.1")) -> list[scenario.Server]:
    """A head and two headless nodes, an engine of two ranks on each."""
    elsewhere = ("--data-parallel-address", "10.0.0.1", "--headless", "--data-parallel-start-rank")
    others = [scenario.Server(args=(*_DP, *elsewhere, str(k)), listening=False) for k in (1, 2)]
    return [scenario.Server(args=(*_DP, *head_address)), *others]


def test_a_stopped_rank_of_a_headless_node_is_reached_from_the_head() -> None:
    servers = dp_nodes()
    servers[2].states[scenario.WORKER0 + 1] = "T"
    reports = [report(node, s.snapshot()) for node, s in zip(("a", "b", "c"), servers, strict=True)]
    fleet = judge(reports)
    assert at(fleet) == ("process-stopped", "c", "Worker_TP1")
    assert [job.nodes for job in fleet.jobs] == [("a", "b", "c")]
    front = [(link.subject.label, link.subject.node) for link in fleet.verdict.chain[:2]]
    assert front == [("client", None), ("APIServer", "a")]


def test_a_head_that_names_no_address_of_its_own_is_joined_by_those_that_call_it() -> None:
    servers = dp_nodes(head_address=())
    snapshots = [s.snapshot() for s in servers]
    sockets = (
        *snapshots[0].sockets,
        msgspec.structs.replace(snapshots[0].sockets[0], family="tcp", inode=77, local="10.0.0.1:29550"),
    )
    snapshots[0] = msgspec.structs.replace(snapshots[0], sockets=sockets)
    jobs = jobs_of([report(node, s) for node, s in zip(("a", "b", "c"), snapshots, strict=True)])
    assert [job.nodes for job in jobs] == [("a", "b", "c")]


# -- what is told of nodes ---------------------------------------------------------------------------------------------


def test_clocks_versions_and_times_of_nodes_are_told() -> None:
    odd = report("b", state("serving"), tool="0.0.9", skew_s=-42.0, skew_within_s=0.4, took_s=5.1)
    (line,) = [n for n in judge([report("a", state("serving")), odd]).nodes if n.node == "b"]
    assert (line.tool, line.skew_s, line.took_s, line.status) == ("0.0.9", -42.0, 5.1, "ok")


def test_part_of_an_answer_is_judged_and_the_rest_named() -> None:
    part = report("a", state("worker-stopped"), problem="1 of 2 instances are missing")
    fleet = judge([part])
    assert fleet.verdict.cause == "process-stopped"
    assert "1 of 2 instances" in fleet.nodes[0].summary


def test_a_snapshot_keeps_its_own_node_when_it_is_placed() -> None:
    assert placed(state("idle"), "x").node.hostname == "x"

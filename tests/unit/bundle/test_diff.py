"""Two looks compared: what differs is named by role and rank, and what does not is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import msgspec
import pytest

from tests.unit.diagnosis.scenario import ENGINE, WORKER0, Server
from tests.unit.diagnosis.test_causes import FAULTS, Scenario, worker_stopped
from vllmdiag.bundle.diff import Look, compare
from vllmdiag.bundle.pack import pack
from vllmdiag.bundle.redact import Redactor
from vllmdiag.cli.main import main
from vllmdiag.model.diff import Change, Diff
from vllmdiag.model.gpu import Accelerator, Trouble
from vllmdiag.model.process import Limits
from vllmdiag.model.snapshot import Node, Snapshot
from vllmdiag.render.diff import diff_text
from vllmdiag.render.document import json_schema, to_json
from vllmdiag.render.page import Style

W1 = WORKER0 + 1


def snapshot(change: Scenario | None = None) -> Snapshot:
    server = Server()
    if change is not None:
        change(server)
    return server.snapshot()


def difference(before: Snapshot, after: Snapshot) -> Diff:
    return compare(Look(before, "a"), Look(after, "b"))


def changes(diff: Diff, label: str) -> dict[str, tuple[str | None, str | None]]:
    return {c.what: (c.before, c.after) for p in diff.processes if p.name == label for c in p.changes}


@pytest.mark.parametrize("change", [change for _, change, *_ in FAULTS[::6]], ids=lambda change: change.__name__)
def test_a_look_does_not_differ_from_itself(change: Callable[[Server], None]) -> None:
    seen = snapshot(change)
    diff = difference(seen, seen)
    assert not diff.differs
    assert "no difference" in diff_text(diff, Style())


def test_a_worker_that_was_stopped_is_told_with_its_state_its_ring_and_the_verdict() -> None:
    diff = difference(snapshot(), snapshot(worker_stopped))
    assert changes(diff, "Worker_TP1")["state"] == ("S", "T")
    (ring,) = [r for r in diff.rings if r.name == "broadcast ring of EngineCore"]
    assert Change(what="unread by Worker_TP1", before="0", after="1") in ring.changes
    assert Change(what="first blocker", before=None, after="Worker_TP1") in diff.instance
    stack = next(c for p in diff.processes if p.name == "Worker_TP0" for c in p.changes if c.what == "stack")
    assert stack.after is not None
    assert "OpOverloadPacket.__call__" in stack.after
    assert "worker_busy_loop" in stack.detail


def test_a_process_that_is_gone_appeared_or_was_restarted_is_told_apart() -> None:
    def without_w1(server: Server) -> None:
        server.gone = {W1}

    assert ("Worker_TP1", "gone") in {(p.name, p.fate) for p in difference(snapshot(), snapshot(without_w1)).processes}
    assert ("Worker_TP1", "appeared") in {
        (p.name, p.fate) for p in difference(snapshot(without_w1), snapshot()).processes
    }
    again = snapshot()
    processes = tuple(msgspec.structs.replace(p, starttime=p.starttime + 900) for p in again.processes)
    diff = difference(again, msgspec.structs.replace(again, processes=processes))
    assert {p.fate for p in diff.processes} == {"restarted"}


def test_environment_limits_and_versions_are_compared() -> None:
    before = snapshot()
    engine = before.process(ENGINE)
    assert engine is not None
    changed = msgspec.structs.replace(
        engine, environ={"NCCL_DEBUG": "INFO"}, limits=Limits(nofile=1024), wchan="do_wait"
    )
    others = tuple(changed if p.pid == ENGINE else p for p in before.processes)
    after = msgspec.structs.replace(before, processes=others, node=Node(kernel="6.9"))
    diff = difference(before, after)
    found = changes(diff, "EngineCore")
    assert found["variable NCCL_DEBUG"] == (None, "INFO")
    assert found["limit nofile"][1] == "1024"
    assert found["sleeps in"] == (None, "do_wait")
    assert "kernel" in {c.what for c in diff.instance}


def test_counters_have_a_rate_where_the_time_between_is_known_and_gauges_have_none() -> None:
    def counted(tokens: float, running: float) -> Scenario:
        def change(server: Server) -> None:
            server.metrics = ({}, {"generation_tokens_total": tokens, "num_requests_running": running})

        return change

    first = msgspec.structs.replace(snapshot(counted(5, 1)), observed_at="2026-01-01T00:00:00Z")
    last = msgspec.structs.replace(snapshot(counted(105, 3)), observed_at="2026-01-01T00:00:10Z")
    rates = {c.name: (c.before, c.after, c.per_s) for c in difference(first, last).counters}
    assert rates == {"generation_tokens_total": (5.0, 105.0, 10.0), "num_requests_running": (1.0, 3.0, None)}


def test_devices_are_compared_by_vendor_and_index() -> None:
    before, after = (
        msgspec.structs.replace(snapshot(), accelerators=(Accelerator(vendor="nvidia", index=0, troubles=troubles),))
        for troubles in ((), (Trouble(code="lost", text="fell off the bus", critical=True),))
    )
    (device,) = difference(before, after).devices
    assert (device.name, device.changes) == (
        "nvidia 0",
        (Change(what="troubles", before=None, after="fell off the bus"),),
    )


def test_tokens_of_different_keys_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    seen = msgspec.structs.replace(snapshot(), node=Node(hostname="gpu-07", kernel="6.8"))
    files = []
    for name, key in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        (tmp_path / name).write_bytes(pack([seen], Redactor(key)))
        files.append(str(tmp_path / name))
    assert main(["diff", files[0], files[1], "-o", str(tmp_path / "out")]) == 0
    assert "different keys" in (tmp_path / "out").read_text(encoding="utf-8")
    assert main(["diff", files[0], files[2], "-o", str(tmp_path / "out")]) == 0
    assert "different keys" not in (tmp_path / "out").read_text(encoding="utf-8")


def test_exit_codes_are_those_of_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seen in (("a", snapshot()), ("b", snapshot(worker_stopped))):
        (tmp_path / name).write_text(to_json(seen), encoding="utf-8")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["diff", a, a]) == 0
    assert main(["diff", a, b]) == 1
    assert main(["diff", a, str(tmp_path / "none")]) == 65
    assert main(["diff", "-", "-"]) == 64
    capsys.readouterr()
    assert main(["diff", a, b, "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json.loads(json_schema("diff"))).validate(document)
    assert document["differs"] is True


def test_the_page_folds_ranks_that_changed_alike_and_marks_who_is_gone() -> None:
    before = Server(tp=4)
    after = Server(tp=4)
    after.states = {WORKER0: "T", W1: "T", WORKER0 + 2: "T"}
    after.gone = {WORKER0 + 3}
    text = diff_text(difference(before.snapshot(), after.snapshot()), Style())
    assert "- Worker_TP3 (pid 303) gone" in text
    assert "state" in text
    assert "S → T" in " ".join(text.split())

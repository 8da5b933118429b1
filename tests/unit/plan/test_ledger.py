"""The ledger counts each copy once for each who makes it; times of a live server are split where the rings show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.diagnosis.scenario import WINDOW, Server
from vllmdiag.diagnosis.case import Case
from vllmdiag.diagnosis.scene import scene_of
from vllmdiag.diagnosis.timing import times_of
from vllmdiag.model.ledger import LayerTime, Ledger, Load
from vllmdiag.model.plan import Topology
from vllmdiag.plan.ledger import ledger


def times(account: Ledger, stage: str, what: str) -> int:
    (entry,) = [e for e in (*account.request, *account.step) if e.stage == stage and e.what == what]
    return entry.times


@given(st.integers(2, 8))
def test_every_local_rank_reads_each_command_once(tp: int) -> None:
    account = ledger(Topology(tp=tp), Load())
    assert times(account, "ring", "execute_model read by each local rank") == tp
    assert times(account, "ring", "execute_model into the slot") == 1
    assert account.step_bytes == sum(account.sums.values())


def test_ranks_of_another_node_cost_two_copies_in_the_kernel_each() -> None:
    account = ledger(Topology(nodes=2, gpus_per_node=2, tp=4), Load())
    assert times(account, "ring", "execute_model read by each local rank") == 2
    assert times(account, "ring", "execute_model to each remote rank") == 4


def test_what_does_not_fit_a_slot_goes_over_the_socket_to_every_reader() -> None:
    small = ledger(Topology(tp=4), Load(tensor_bytes=8 << 20))
    large = ledger(Topology(tp=4), Load(tensor_bytes=20 << 20))
    assert not any("does not fit a slot" in note for note in small.notes)
    (note,) = [note for note in large.notes if "does not fit a slot" in note]
    assert "8 copies in the kernel" in note
    roomier = ledger(Topology(tp=4, chunk_mib=64), Load(tensor_bytes=20 << 20))
    assert not any("does not fit a slot" in note for note in roomier.notes)


@pytest.mark.parametrize(
    ("size", "version", "pickled"), [(1000, None, True), (2 << 20, None, False), (2 << 20, "0.10.2", True)]
)
def test_large_arrays_travel_beside_the_pickle(size: int, version: str | None, pickled: bool) -> None:
    notes = ledger(Topology(tp=2, version=version), Load(tensor_bytes=size)).notes
    assert any("copied into the pickle" in note for note in notes) == pickled
    assert any("beside the pickle" in note for note in notes) != pickled


def test_one_rank_in_the_engine_has_no_ring() -> None:
    account = ledger(Topology(), Load())
    assert "shared" not in account.sums
    assert any("no ring" in note for note in account.notes)


def timed(server: Server) -> tuple[dict[str, LayerTime], int]:
    scene = scene_of(server.snapshot())
    assert scene is not None
    found, steps = times_of(Case(scene))
    return {time.layer: time for time in found}, steps


def test_a_step_is_split_at_what_the_flags_show() -> None:
    server = Server(tp=2)
    read, unread = server.ring({}), server.ring({3: (0, 1)})
    idle, answered = b"\x01" * 20, b"\x01" * 6 + b"\x01\x00" + b"\x01" * 12
    server.broadcast = [read, unread, read, read, read, read]
    server.replies = {0: [idle, idle, idle, answered, idle, idle]}
    layers, steps = timed(server)
    assert steps == 1
    shares = {name: layers[name].share for name in ("ring wait", "compute", "reply", "engine")}
    assert shares == {
        "ring wait": pytest.approx(1 / 6),
        "compute": pytest.approx(1 / 6),
        "reply": pytest.approx(1 / 6),
        "engine": pytest.approx(3 / 6),
    }
    assert layers["compute"].seconds == pytest.approx(WINDOW / 6)


def test_an_idle_server_shows_no_step_and_says_so() -> None:
    layers, steps = timed(Server(tp=2))
    assert steps == 0
    assert layers["compute"].seconds is None
    assert "no step" in layers["compute"].how


def test_counters_give_the_time_in_the_queue_and_what_is_left_over() -> None:
    def page(n: float) -> dict[str, float]:
        spent = {"request_queue_time": 0.5, "request_prefill_time": 1.0, "request_decode_time": 2.0}
        whole = {**spent, "e2e_request_latency": 4.0}
        return {f"{k}_seconds_{end}": v for k, s in whole.items() for end, v in (("sum", s * n), ("count", n))}

    layers, _ = timed(Server(tp=2, metrics=(page(10), page(20))))
    assert layers["scheduler queue"].seconds == pytest.approx(0.5)
    assert layers["API server, input, output"].seconds == pytest.approx(0.5)
    assert layers["decode"].seconds == pytest.approx(2.0)


def test_what_cannot_be_known_says_why() -> None:
    layers, _ = timed(Server(tp=2, uniproc=True))
    assert all(time.how for time in layers.values())
    assert layers["client"].seconds is None
    assert layers["ring wait"].seconds is None

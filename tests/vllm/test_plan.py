"""`vllmdiag plan` agrees with live servers: processes, rings, bytes and sockets exactly, descriptors as it says."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Vllmdiag
from tests.vllm.server import Server

PLANNED = ("tp2", "pp2", "dp2", "tp2dp2", "api2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.topology(name)) for name in PLANNED])
def test_a_live_server_agrees_with_its_plan(name: str, server: Server, vllmdiag: Vllmdiag) -> None:
    answer = vllmdiag.json("plan", "--check", server.roots[0])
    differing = [row for row in answer.data["compared"] if not row["agrees"]]
    assert (differing, answer.code) == ([], 0)
    seen = {row["what"]: row["seen"] for row in answer.data["compared"]}
    assert seen["Worker processes"] == server.topology.workers
    assert seen["broadcast rings"] == server.topology.engines
    assert seen["bytes of response rings"] > 0
    assert seen["unix sockets that listen"] > 0


@pytest.mark.topology("tp2")
def test_the_plan_of_the_same_options_says_the_same(server: Server, vllmdiag: Vllmdiag) -> None:
    live = vllmdiag.json("plan", "--from", server.roots[0]).data["kinds"]
    asked = vllmdiag.json("plan", "--tp", 2, "--gpus-per-node", 2).data["kinds"]
    kept = ("rings", "roles", "shm_bytes", "unix_paths", "processes")
    assert [{k: kind[k] for k in kept} for kind in live] == [{k: kind[k] for k in kept} for kind in asked]

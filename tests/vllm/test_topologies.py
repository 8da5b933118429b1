"""Whatever the shape of the instance, `vllmdiag ps` shows every process of it in its role, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Vllmdiag
from tests.vllm.server import Server
from tests.vllm.setup_vllm import wanted_version
from tests.vllm.topologies import available

every_topology = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.topology(name)) for name in available(wanted_version())]
)


def by_role(view: dict[str, Any]) -> dict[str, list[int]]:
    """Role -> pids as `ps` lists them."""
    roles: dict[str, list[int]] = {}
    for member in view["members"]:
        roles.setdefault(member["role"], []).append(member["pid"])
    return roles


@every_topology
def test_ps_names_every_process_by_role(name: str, server: Server, vllmdiag: Vllmdiag) -> None:
    truth = server.pids()
    answer = vllmdiag.json("ps", server.roots[0], "--window", "0.2")
    assert answer.code == 0, answer.err
    shown = by_role(answer.data)
    assert sorted(shown.get("APIServer", [])) == sorted(truth["APIServer"])
    assert sorted(shown["EngineCore"]) == sorted(truth["EngineCore"])
    assert sorted(shown["Worker"]) == sorted(truth["Worker"])
    assert sorted(shown.get("DPCoordinator", [])) == sorted(truth["DPCoordinator"])
    everything = {pid for pids in shown.values() for pid in pids}
    assert everything <= set(server.processes())


@every_topology
def test_any_process_of_the_instance_will_do_as_the_target(name: str, server: Server, vllmdiag: Vllmdiag) -> None:
    views = [vllmdiag.json("ps", pid, "--window", "0.2").data for pid in (server.roots[0], server.workers[-1])]
    assert by_role(views[0]) == by_role(views[1])

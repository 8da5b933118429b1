from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest
import zmq

from vllmdiag.vllm.endpoints import Endpoint, between, endpoints, is_ipc_path, kind_of_listener


def names(listener: str, connector: str, version: str | None = None) -> list[str]:
    return [e.name for e in between(listener, connector, version)]


def test_the_pair_of_roles_names_the_endpoint() -> None:
    assert names("APIServer", "EngineCore", "0.8.5") == ["engine input", "engine output"]
    assert names("DPCoordinator", "APIServer") == ["coordinator front publish"]
    assert names("APIServer", "Worker") == []


def test_a_ring_has_a_second_path_since_0_18() -> None:
    assert names("EngineCore", "Worker", "0.17.1") == ["broadcast overflow", "remote broadcast"]
    assert names("EngineCore", "Worker", "0.18.0") == ["broadcast overflow", "broadcast notify", "remote broadcast"]


def test_a_launcher_binds_what_a_lone_api_server_would() -> None:
    assert names("Launcher", "EngineCore") == names("APIServer", "EngineCore")
    assert names("EngineCore", "RayWorker") == names("EngineCore", "Worker")


SOCKET_PAIRS = {("ROUTER", "DEALER"), ("PULL", "PUSH"), ("XPUB", "SUB"), ("PUB", "SUB"), ("XPUB", "XSUB")}


@pytest.mark.parametrize("endpoint", endpoints(), ids=lambda e: e.name)
def test_the_socket_types_can_talk_to_each_other(endpoint: Endpoint) -> None:
    assert (endpoint.bind_type, endpoint.connect_type) in SOCKET_PAIRS


def test_the_backlog_tells_a_zmq_listener() -> None:
    context = zmq.Context()
    try:
        with context.socket(zmq.PULL) as listener:
            backlog = listener.getsockopt(zmq.BACKLOG)
        assert isinstance(backlog, int)
        kind = kind_of_listener(backlog)
        assert kind is not None
        assert kind.kind == "zmq"
    finally:
        context.term()


def test_the_backlog_tells_http_and_groups() -> None:
    kinds = [kind_of_listener(backlog) for backlog in (2048, 4096, 5)]
    assert [kind and kind.kind for kind in kinds] == ["http", "group", None]


def test_an_ipc_path_is_a_directory_and_a_uuid(tmp_path: Path) -> None:
    path = tmp_path / str(uuid.uuid4())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert is_ipc_path(str(listener.getsockname()))
    assert not is_ipc_path(str(tmp_path / "docker.sock"))
    assert not is_ipc_path("")

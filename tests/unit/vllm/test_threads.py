from __future__ import annotations

import pytest

from tests.unit.vllm.stacks import frames
from vllmdiag.model.process import ThreadStack
from vllmdiag.vllm.threads import expected, is_thread, native


def thread(name: str, function: str = "f") -> ThreadStack:
    return ThreadStack(
        name=name, frames=frames(f"    poll (zmq/sugar/poll.py:1)\n    EngineCoreProc.{function} (core.py:2)")
    )


def missing(role: str, stacks: tuple[ThreadStack, ...], version: str) -> list[str]:
    wanted = [t for t in expected(role, version) if t.required]
    return [t.function for t in wanted if not any(is_thread(stack, t) for stack in stacks)]


ENGINE_0_32 = (
    thread("MainThread"),
    thread("Thread-1 (process_input_sockets)"),
    thread("Thread-2 (process_output_sockets)"),
    thread("MultiprocWorkerMonitor"),
)


def test_a_healthy_engine_misses_no_thread() -> None:
    assert missing("EngineCore", ENGINE_0_32, "0.32.0") == []


def test_a_thread_that_has_died_is_named() -> None:
    left = tuple(t for t in ENGINE_0_32 if "input" not in t.name)
    assert missing("EngineCore", left, "0.32.0") == ["process_input_sockets"]


def test_the_singular_name_of_0_8_is_another_thread() -> None:
    old = (thread("Thread-1 (process_input_socket)"), thread("Thread-2 (process_output_socket)"))
    assert missing("EngineCore", old, "0.8.5") == []
    assert len(missing("EngineCore", old, "0.9.2")) == 2


def test_a_thread_without_a_telling_name_is_known_by_its_function() -> None:
    unnamed = (thread("Thread-1", "process_input_sockets"), thread("Thread-2", "process_output_sockets"))
    assert missing("EngineCore", unnamed, "0.9.2") == []


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.9.2", []),
        ("0.10.0", []),
        ("0.10.1", ["WorkerDeathMonitor"]),
        ("0.12.0", ["WorkerDeathMonitor"]),
        ("0.17.1", ["WorkerDeathMonitor"]),
        ("0.18.0", ["DeathPipeMonitor"]),
        ("0.33.0", ["DeathPipeMonitor"]),
    ],
)
def test_the_thread_that_watches_the_parent_has_its_name_by_version(version: str, names: list[str]) -> None:
    assert [t.name for t in expected("Worker", version) if t.required] == names


def test_optional_threads_are_never_missing() -> None:
    assert missing("APIServer", (thread("MainThread"),), "0.32.0") == []


@pytest.mark.parametrize("comm", ["ZMQbg/IO/0", "ZMQbg/Reaper", "pt_gloo_runloop", "gloo_tcp_loop", "pt_tcpstore_uv"])
def test_the_threads_of_libraries_are_known_by_comm(comm: str) -> None:
    assert native(comm) is not None


@pytest.mark.parametrize("comm", ["", "python3.11", "VLLM::EngineCor", "xZMQbg/Reaper"])
def test_other_comms_say_nothing(comm: str) -> None:
    assert native(comm) is None

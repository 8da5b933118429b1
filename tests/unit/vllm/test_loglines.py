from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.loglines import find, kinds, origin_of, side_of

LONG_WAIT = (
    "(EngineCore pid=29401) INFO 11-30 22:45:48 [shm_broadcast.py:871] No available shared memory broadcast block "
    "found in 5 seconds. This typically happens when some processes are hanging"
)


@pytest.mark.parametrize(
    ("line", "kind", "groups", "echo"),
    [
        (LONG_WAIT, "long_wait", {"seconds": "5"}, True),
        ("No available shared memory broadcast block foundin 60 second.", "long_wait", {"seconds": "60"}, True),
        ("WARNING shm_broadcast.py:396] No available block found in 60 second.", "long_wait", {"seconds": "60"}, True),
        (
            "ERROR [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), ",
            "worker_died",
            {"worker": "VllmWorker-1", "exit_code": "-9"},
            False,
        ),
        ("Worker proc VllmWorker-1 died unexpectedly, ", "worker_died", {"worker": "VllmWorker-1"}, False),
        ("[multiproc_executor.py:843] Parent process exited, terminating worker queues", "parent_exited", {}, True),
        (
            "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free.",
            "insufficient_shm",
            {"path": "/dev/shm", "what": "shared-memory allocation", "required_mib": "160", "free_mib": "64"},
            False,
        ),
        (
            "DEBUG [v1/engine/utils.py:1401] Waiting for 0 local, 1 remote core engine proc(s) to connect.",
            "waiting_engines",
            {"local": "0", "remote": "1", "stage": "connect"},
            False,
        ),
        ("[v1/engine/core.py:1247] Waiting for READY message from DP Coordinator...", "waiting_coordinator", {}, False),
        (
            "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
            "engine_init_failed",
            {"procs": "{'EngineCore': 1}"},
            True,
        ),
        (
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
            "engine_dead",
            {},
            True,
        ),
        ("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "engine_exited", {}, False),
        ("TimeoutError: RPC call to sample_tokens timed out.", "rpc_timeout", {"method": "sample_tokens"}, True),
        ("INFO:     Application startup complete.", "started", {}, False),
    ],
)
def test_a_recorded_line_is_understood(line: str, kind: str, groups: dict[str, str], echo: bool) -> None:
    found = find(line)
    assert found is not None
    assert (found.kind.id, found.groups, found.kind.echo) == (kind, groups, echo)


def test_an_ordinary_line_means_nothing() -> None:
    assert find("INFO [launcher.py:46] Route: /health, Methods: GET") is None
    assert find("") is None


def test_the_version_rules_lines_out() -> None:
    line = "Insufficient space in /dev/shm for x: 1 MiB required, 0 MiB free"
    assert find(line, "0.27.0") is not None
    assert find(line, "0.26.0") is None


@pytest.mark.parametrize(
    ("line", "version", "side"),
    [
        (LONG_WAIT, None, "reader"),
        (LONG_WAIT, "0.32.0", "reader"),
        (LONG_WAIT.replace("871", "750"), "0.32.0", "writer"),
        (LONG_WAIT.replace("871", "681"), "0.18.1", "reader"),
        (LONG_WAIT.replace("871", "681"), "0.27.0", "writer"),
        (LONG_WAIT.replace("871", "681"), None, None),  # a reader in 0.18, the writer in 0.27
        (LONG_WAIT.replace("871", "466"), None, "reader"),
        (LONG_WAIT.replace("871", "1"), None, None),
        (LONG_WAIT.replace("871", "750"), "0.12.0", None),
        (LONG_WAIT.replace("shm_broadcast.py", "distributed/device_communicators/shm_broadcast.py"), None, "reader"),
        (LONG_WAIT.replace("shm_broadcast.py", "other.py"), None, None),
        ("No available shared memory broadcast block found in 60 seconds", None, None),
    ],
)
def test_the_line_number_tells_a_reader_from_the_writer(line: str, version: str | None, side: str | None) -> None:
    assert side_of(line, version) == side


@pytest.mark.parametrize(
    ("line", "origin"),
    [
        (LONG_WAIT, ("EngineCore", 29401)),
        ("(Worker_TP1_EP1 pid=7) ERROR", ("Worker_TP1_EP1", 7)),
        ("(VllmWorker rank=1 pid=77) INFO", ("VllmWorker rank=1", 77)),
        ("(RayWorkerWrapper pid=7, ip=10.0.0.2) INFO", ("RayWorkerWrapper", 7)),
        ("INFO no prefix (x pid=1)", None),
    ],
)
def test_the_prefix_tells_whose_line_it_is(line: str, origin: tuple[str, int] | None) -> None:
    assert origin_of(line) == origin


def test_the_ids_are_unique() -> None:
    ids = [kind.id for kind in kinds()]
    assert len(ids) == len(set(ids))


@given(st.text())
def test_any_line_is_accepted(line: str) -> None:
    find(line)
    origin_of(line)
    side_of(line)

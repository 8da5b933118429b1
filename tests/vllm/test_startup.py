"""A live start-up held up at its stages: each time the right process, stage and cause; no alarm without one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import checkpoints, faults, procs
from tests.vllm.conftest import Answer, Vllmdiag
from tests.vllm.server import Server, free_ports
from tests.vllm.setup_vllm import Installation
from tests.vllm.waiting import wait_until

Launch = Callable[..., Server]
LOAD = ("--load-format", "auto")
STUCK_S = 180.0
"""A start-up is called stuck when its youngest process is 30 s old, and it is not stuck before it has got there."""
_STEP_S = 0.5


def named(
    vllmdiag: Vllmdiag, server: Server, cause: str, *, deadline_s: float = STUCK_S, passing: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Look again and again until that is the cause. Until then nothing but `starting` (and `passing`) may be said."""
    answers: list[Answer] = []

    def said() -> bool:
        answers.append(vllmdiag.json("diagnose", server.roots[0], "--window", "2"))
        verdict = answers[-1].data["verdict"]
        assert verdict["cause"] in (cause, "starting", *passing), (verdict, server.log_tail(15))
        return bool(verdict["cause"] == cause)

    wait_until(f"the verdict is {cause}", said, deadline_s)
    verdict: dict[str, Any] = answers[-1].data["verdict"]
    assert verdict["layer"] == (1 if cause in ("process-stopped", "worker-dead") else 2)
    assert answers[-1].code == {"critical": 2, "warning": 1}[verdict["status"]]
    return verdict


def functions(pid: int) -> list[str]:
    """The ground truth: names of the functions on the main stack, by py-spy itself; empty where it has no answer."""
    spy = Path(sys.executable).with_name("py-spy")
    done = subprocess.run(
        [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return []
    threads = json.loads(done.stdout)
    main = next((t for t in threads if t["os_thread_id"] == pid), None)
    return [frame["name"].rsplit(".", 1)[-1] for frame in main["frames"]] if main else []


def children_of(*parents: int) -> list[int]:
    """Its engines (or workers), titled or not."""
    return [p.pid for p in procs.children(parents, procs.scan()) if "resource_tracker" not in p.title]


@contextmanager
def frozen_in(function: str, pids: Callable[[], list[int]], deadline_s: float = 180) -> Iterator[int]:
    """SIGSTOP one of the processes while `function` is on its stack; yields which, and lets it go on at the end.

    It is stopped for every look, and goes on for `_STEP_S` between two: no stage that takes longer is missed, however
    slow the looks are.
    """
    with ExitStack() as cleanup:

        def caught() -> int | None:
            for pid in pids():
                stopped = ExitStack()
                with suppress(ProcessLookupError):
                    stopped.enter_context(faults.stopped(pid))
                    if function in functions(pid):
                        cleanup.push(stopped.pop_all())
                        return pid
                stopped.close()
            return None

        yield int(wait_until(f"{function} is on a stack", caught, deadline_s, every_s=_STEP_S) or 0)


def frozen_at(vllmdiag: Vllmdiag, server: Server, role: str, function: str, stage: str) -> None:
    """Stop a process of that role at that stage: it is named, with the stage; then it goes on."""

    def candidates() -> list[int]:
        if role == "APIServer":
            return server.roots
        engines = children_of(*server.roots)
        return engines if role == "EngineCore" else children_of(*engines)

    with frozen_in(function, candidates) as pid:
        verdict = named(vllmdiag, server, "process-stopped", deadline_s=30)
        assert (verdict["subject"]["pid"], verdict["subject"]["role"]) == (pid, role), verdict
        assert any(f"stage of its start-up: {stage}" in words for words in verdict["evidence"]), verdict["evidence"]
        assert verdict["chain"][-1]["subject"]["pid"] == pid


def test_a_process_stopped_at_each_stage_and_then_a_fifo_in_place_of_the_weights(
    launch: Launch, vllmdiag: Vllmdiag, installation: Installation, tmp_path: Path
) -> None:
    fifo = checkpoints.with_fifo(installation.tiny, tmp_path / "model")
    server = launch("tp1", model=str(fifo.parent), args=LOAD)
    frozen_at(vllmdiag, server, "EngineCore", "_find_and_load", "imports modules")
    frozen_at(vllmdiag, server, "Worker", "_find_and_load", "imports modules")
    frozen_at(vllmdiag, server, "Worker", "load_weights", "loads weights")
    frozen_at(vllmdiag, server, "EngineCore", "wait_for_ready", "waits for its workers")
    frozen_at(vllmdiag, server, "APIServer", "wait_for_engine_startup", "waits for its engines")

    verdict = named(vllmdiag, server, "startup-phase-stuck")
    (worker,) = server.workers
    assert (verdict["subject"]["role"], verdict["subject"]["pid"]) == ("Worker", worker)
    assert "loads weights" in verdict["summary"]
    assert "FIFO" in verdict["summary"]
    assert [link["subject"]["role"] for link in verdict["chain"][1:]] == ["APIServer", "EngineCore", "Worker"]
    assert verdict["since_s"] > 2


@pytest.mark.skipif(not checkpoints.throttling_works(), reason="cannot slow down a disk here: needs root, cgroup v1")
def test_weights_from_a_slow_disk_are_a_start_up_with_its_speed_and_no_alarm(
    launch: Launch, vllmdiag: Vllmdiag, installation: Installation, tmp_path: Path
) -> None:
    model = checkpoints.with_weights(installation.tiny, tmp_path / "model", hidden=1024, layers=6, shards=4)
    files = sorted(model.glob("*.safetensors"))
    with checkpoints.slow_disk(files, 5_000_000, f"vllmdiag-{tmp_path.name}") as group:
        server = launch("tp1", model=str(model), args=LOAD, under=("sh", "-c", f'echo $$ >{group} && exec "$@"', "sh"))
        said: list[dict[str, Any]] = []

        def ready() -> bool:
            answer = vllmdiag.json("diagnose", server.roots[0], "--window", "1")
            assert answer.code == 0, answer.data["verdict"]
            said.append(answer.data["verdict"])
            return server.get_status("/health") == 200

        wait_until("the server is ready", ready, 300)
        server.stop()
    loading = [v["summary"] for v in said if "loads weights" in v["summary"]]
    assert len(loading) >= 5, said
    assert any("MB/s read" in words for words in loading)
    assert any(f"shard {n} of 4" in words for words in loading for n in (1, 2, 3, 4)), loading


@pytest.mark.parametrize("purpose", ["HTTP"])
def test_a_taken_http_port(launch: Launch, vllmdiag: Vllmdiag, purpose: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = launch("tp1", args=("--port", str(port)))
        verdict = named(vllmdiag, server, "port-conflict", deadline_s=30)
    assert f"port {port} ({purpose}) is taken by" in verdict["summary"]
    assert str(os.getpid()) in verdict["summary"]


def test_a_taken_master_port(launch: Launch, vllmdiag: Vllmdiag) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = launch("two_nodes", only=(0,), args=("--master-port", str(port)))
        verdict = named(vllmdiag, server, "port-conflict", deadline_s=60)
    assert f"port {port} (master) is taken by" in verdict["summary"]


def test_a_base_path_that_is_too_long_for_a_socket(launch: Launch, vllmdiag: Vllmdiag, tmp_path: Path) -> None:
    base = tmp_path / ("d" * 100)
    base.mkdir()
    server = launch("tp1", env={"VLLM_RPC_BASE_PATH": str(base)})
    verdict = named(vllmdiag, server, "ipc-path-too-long", deadline_s=60)
    assert "VLLM_RPC_BASE_PATH" in verdict["summary"]


def test_an_interface_that_does_not_exist(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("two_nodes", only=(0,), env={"GLOO_SOCKET_IFNAME": "eth77"})
    verdict = named(vllmdiag, server, "wrong-interface", deadline_s=60)
    assert "eth77" in verdict["summary"]


def test_a_second_node_that_never_comes(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("two_nodes", only=(0,))
    frozen_at(vllmdiag, server, "Worker", "init_process_group", "meets the other ranks at the store")
    verdict = named(vllmdiag, server, "startup-barrier")
    assert verdict["subject"]["node"] == "node 1"
    assert "node 1 of 2" in verdict["summary"]
    assert any("cannot be known from here" in words for words in verdict["evidence"])
    assert any("1 of 2 ranks connected" in words for words in verdict["evidence"]), verdict["evidence"]


def test_a_head_node_that_never_comes(launch: Launch, vllmdiag: Vllmdiag) -> None:
    server = launch("headless_dp2", only=(1,))
    frozen_at(vllmdiag, server, "EngineCore", "startup_handshake", "said HELLO, waits for its addresses")
    verdict = named(vllmdiag, server, "handshake-incomplete")
    assert "the head node" in verdict["summary"]
    assert any("cannot be known from here" in words for words in verdict["evidence"])
    assert any("said HELLO" in words for words in verdict["evidence"])


def test_a_worker_that_dies_while_it_loads(
    launch: Launch, vllmdiag: Vllmdiag, installation: Installation, tmp_path: Path
) -> None:
    fifo = checkpoints.with_fifo(installation.tiny, tmp_path / "model")
    server = launch("tp2", model=str(fifo.parent), args=LOAD)
    wait_until("both load", lambda: [w for w in server.workers if "load_weights" in functions(w)][1:], 120)
    victim = server.workers[1]
    killer = threading.Timer(1.0, os.kill, [victim, signal.SIGKILL])
    killer.start()
    verdict = vllmdiag.json("diagnose", server.roots[0], "--window", "2").data["verdict"]
    killer.join()
    assert (verdict["cause"], verdict["subject"]["pid"], verdict["subject"]["rank"]) == (
        "worker-dead",
        victim,
        {"tp": 1},
    )
    assert any("Worker_TP0" in words and "loads weights" in words for words in verdict["evidence"]), verdict["evidence"]


def two_nodes(launch: Launch, **second: Any) -> tuple[Server, Server]:
    """Two servers that make one instance: node 0, and node 1 as `second` says."""
    args = ("--master-port", str(free_ports(1)[0]))
    return launch("two_nodes", only=(0,), args=args), launch("two_nodes", only=(1,), args=args, **second)


def test_a_second_node_that_is_stopped_and_then_dead(launch: Launch, vllmdiag: Vllmdiag) -> None:
    head, other = two_nodes(launch)
    wait_until("node 1 has a worker", lambda: children_of(*other.roots), 90)
    with faults.stopped(*other.roots, *children_of(*other.roots)):
        verdict = named(vllmdiag, head, "process-stopped", deadline_s=60)
        assert verdict["subject"]["node"] == "node 1"
        assert verdict["subject"]["role"] == "Worker"
        other.stop()
    verdict = named(vllmdiag, head, "startup-barrier")
    assert verdict["subject"]["node"] == "node 1"
    assert any("cannot be known from here" in words for words in verdict["evidence"])


def test_a_second_node_that_is_cut_off(launch: Launch, vllmdiag: Vllmdiag) -> None:
    lo_up = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    head, _ = two_nodes(launch, under=lo_up)
    verdict = named(vllmdiag, head, "startup-barrier")
    assert any("node 1" in words and "another network namespace" in words for words in verdict["evidence"]), verdict


COMPILE = "import torch; torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(64))"
COMPILER = """#!/bin/sh
case "$*" in *" -o "*) [ ! -e "$0.hangs" ] || exec sleep 86400 ;; esac
exec g++ "$@"
"""


def lock_of_the_compiler(installation: Installation, place: Path, env: dict[str, str]) -> Path:
    """The lock under which torch compiles its header, below a temporary directory: named after what it compiles."""
    place.mkdir()
    command = [str(installation.python), "-c", COMPILE]
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    subprocess.run(command, env={**kept, **env, "TMPDIR": str(place)}, check=True, capture_output=True)
    (lock,) = place.glob("torchinductor_*/precompiled_headers/locks/*.lock")
    return lock.relative_to(place)


def test_a_lock_of_the_compiler_that_another_holds_and_then_a_compiler_that_hangs(
    launch: Launch, vllmdiag: Vllmdiag, installation: Installation, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    env = {"CXX": str(compiler)}
    name = lock_of_the_compiler(installation, tmp_path / "tmp", env)
    own = tmp_path / "work"
    held = own / name
    held.parent.mkdir(parents=True)
    env |= {
        "TMPDIR": str(own),
        "TORCHINDUCTOR_CACHE_DIR": str(own / name.parts[0]),  # nothing compiled before may be found
        "VLLM_CACHE_ROOT": str(own / "vllm"),
    }
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        server = launch("tp1", args=("--no-enforce-eager",), env=env)
        verdict = named(vllmdiag, server, "jit-lock", deadline_s=240)
        assert (verdict["subject"]["role"], verdict["subject"]["pid"]) == ("Worker", server.workers[0])
        assert f"{held}, held by" in verdict["summary"], verdict
        assert str(os.getpid()) in verdict["summary"]
        assert verdict["status"] == "warning"  # its holder is alive
        compiler.with_name("g++.hangs").touch()
    verdict = named(vllmdiag, server, "slow-compile", passing=("jit-lock",), deadline_s=240)
    assert (verdict["subject"]["role"], verdict["subject"]["pid"]) == ("Worker", server.workers[0])

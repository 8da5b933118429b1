"""Whoever looks, and from wherever: what can be seen is judged, the rest is missing, and blind is never healthy."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm import procs
from tests.vllm.conftest import Answer, Vllmdiag
from tests.vllm.faults import stopped
from tests.vllm.outsiders import WITHOUT_PTRACE, as_nobody
from tests.vllm.server import Server
from tests.vllm.waiting import wait_until

pytestmark = pytest.mark.needs("root")

Look = Callable[..., Answer]


def without_ptrace(*args: str | int) -> Answer:
    """Root in a container to which SYS_PTRACE was not given."""
    command = [*WITHOUT_PTRACE, "-m", "vllmdiag", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return Answer(done.returncode, done.stdout, done.stderr)


OUTSIDERS = [
    pytest.param(as_nobody, id="another user"),
    pytest.param(without_ptrace, id="root without SYS_PTRACE", marks=pytest.mark.needs("setpriv")),
]


def judged(answer: Answer) -> Any:
    """The diagnosis, after what must hold of every run."""
    assert not answer.err
    data = answer.data
    assert answer.code == {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[data["verdict"]["status"]]
    assert all(hole["what"] and hole["why"] and hole["next"] for hole in data["missing"])
    return data


def not_seen(data: Any) -> str:
    return "; ".join(hole["what"] for hole in data["missing"])


@pytest.mark.parametrize("look", OUTSIDERS)
def test_who_may_not_look_inside_does_not_know_and_says_what_to_do(look: Look, server: Server) -> None:
    data = judged(look("diagnose", server.api, "--format", "json"))
    assert data["verdict"]["status"] == "unknown"
    assert data["target"]["worker_pids"] == server.workers
    assert [layer["status"] for layer in data["layers"] if layer["layer"] in (2, 3, 4)] == ["unknown"] * 3
    assert f"sockets of pid {server.api}" in not_seen(data)
    assert all(f"stacks of pid {pid}" in not_seen(data) for pid in server.engines + server.workers)


@pytest.mark.parametrize("look", OUTSIDERS)
@pytest.mark.parametrize("role", ["engine", "worker"])
def test_a_stopped_process_is_named_by_everybody(look: Look, role: str, server: Server) -> None:
    pid = server.engine if role == "engine" else server.workers[1]
    with stopped(pid):
        verdict = judged(look("diagnose", server.api, "--format", "json"))["verdict"]
    assert (verdict["status"], verdict["cause"]) == ("critical", "process-stopped")
    assert verdict["subject"]["pid"] == pid


@pytest.mark.parametrize("look", OUTSIDERS)
@pytest.mark.parametrize("verb", ["ps", "shm", "ring", "endpoints", "stacks", "client"])
def test_every_verb_shows_what_it_may_or_says_that_it_may_not(look: Look, verb: str, server: Server) -> None:
    answer = look(verb, server.api, "--window", "0.5", "--format", "json")
    assert answer.code in (0, 3)
    assert not answer.err
    assert answer.code == 0 or answer.data["missing"]


BOX = (
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--kill-child"),
    *("sh", "-c", 'ip link set lo up && mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"', "sh"),
)


@pytest.fixture(scope="module")
def box(pool: Any, installation: Any) -> Any:
    """A server with /dev/shm, pids and network of its own, as in a container. Only its log can be reached from here."""
    pool.release()
    with Server("tp2", under=BOX, installation=installation) as server:
        wait_until("it is up", lambda: "Application startup complete" in server.log_text(), 240)
        yield server


def api_of(box: Server) -> int:
    (api,) = procs.children(box.roots, procs.scan())
    return api.pid


@pytest.mark.needs("unshare", "ip")
class TestBox:
    def test_from_the_host_root_sees_it_whole(self, box: Server, vllmdiag: Vllmdiag) -> None:
        data = judged(vllmdiag.json("diagnose", api_of(box)))
        assert (data["verdict"]["status"], data["verdict"]["cause"]) == ("ok", "idle")
        assert [layer["status"] for layer in data["layers"]] == ["ok"] * 5
        assert data["target"]["port"] == box.port
        assert data["target"]["vllm_version"]
        assert not data["missing"]

    def test_from_the_host_root_names_a_stopped_worker(self, box: Server, vllmdiag: Vllmdiag) -> None:
        with stopped(box.workers[1]):
            verdict = judged(vllmdiag.json("diagnose", api_of(box)))["verdict"]
        assert (verdict["cause"], verdict["subject"]["pid"]) == ("process-stopped", box.workers[1])

    def test_its_shared_memory_is_shown_as_it_sees_it(self, box: Server, vllmdiag: Vllmdiag) -> None:
        data = vllmdiag.json("shm", api_of(box), "--window", "0.5").data
        assert 2 << 30 in [mount["size"] for mount in data["mounts"]]
        assert {segment["name"] for segment in data["segments"] if segment["holders"]}

    @pytest.mark.parametrize("look", OUTSIDERS)
    def test_from_the_host_others_do_not_know(self, look: Look, box: Server) -> None:
        data = judged(look("diagnose", api_of(box), "--format", "json"))
        assert data["verdict"]["status"] == "unknown"
        assert [layer["status"] for layer in data["layers"] if layer["layer"] != 1] == ["unknown"] * 4

    @pytest.mark.parametrize("look", OUTSIDERS)
    def test_from_the_host_others_still_name_a_stopped_engine(self, look: Look, box: Server) -> None:
        with stopped(box.engine):
            verdict = judged(look("diagnose", api_of(box), "--format", "json"))["verdict"]
        assert (verdict["cause"], verdict["subject"]["pid"]) == ("process-stopped", box.engine)

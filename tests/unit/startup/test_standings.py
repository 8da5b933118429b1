"""Who stands where: stage, motion, progress and waits of each process, and what is said of a start-up as a whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.diagnosis import startup_cases as cases
from tests.unit.diagnosis.scenario import (
    API,
    API_WAITS_START,
    ENGINE,
    TIMES,
    WORKER0,
    WORKER_IDLE,
    WORKER_IN_STORE,
    Server,
)
from vllmdiag.diagnosis.case import Case
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.diagnosis.scene import scene_of
from vllmdiag.diagnosis.startup import Standing, standings
from vllmdiag.diagnosis.startup_rules import first_blocker
from vllmdiag.diagnosis.view import view
from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process, ProcessSample
from vllmdiag.model.snapshot import LogLine
from vllmdiag.model.startup import FileLock
from vllmdiag.render.page import Style
from vllmdiag.render.ps import ps_text

W0, W1 = WORKER0, WORKER0 + 1
BLIND = Missing(what="stacks", why="EPERM", next="run as root")


def places(server: Server) -> dict[int, Standing]:
    scene = scene_of(server.snapshot())
    assert scene is not None
    return {s.pid: s for s in standings(Case(scene))}


def standing_server() -> Server:
    server = Server()
    cases.at_the_store(server)
    return server


def test_every_process_has_its_stage_and_the_chain_leads_to_the_first_that_does_not_advance() -> None:
    found = places(standing_server())
    assert {pid: s.stage.id for pid, s in found.items() if s.stage} == {
        API: "server.wait_engines", ENGINE: "engine.wait_workers", W0: "worker.meet", W1: "worker.meet",
    }  # fmt: skip
    assert (found[API].on, found[ENGINE].on, found[W0].on) == ((ENGINE,), (W0, W1), ())
    root = first_blocker(list(found.values()))
    assert root is not None
    assert root.pid == W0
    chain = diagnose(standing_server().snapshot()).verdict.chain
    assert [link.subject.label for link in chain] == ["client", "APIServer", "EngineCore", "Worker_TP0"]


def test_the_engine_says_how_many_of_its_workers_are_ready() -> None:
    server = Server()
    cases.stands(server, WORKER_IDLE, WORKER_IN_STORE)
    assert places(server)[ENGINE].progress == "1 of 2"
    assert places(server)[API].progress == "0 of 1 ready"


def test_a_rank_that_waits_for_a_mate_names_it() -> None:
    server = Server()
    cases.one_rank_still_imports(server)
    found = places(server)
    assert found[W0].on == (W1,)
    assert not found[W0].motion
    assert found[W1].motion


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"utime": 0.9}, True),
        ({"read_bytes": 4096}, True),
        ({"rchar": 1 << 22}, True),
        ({"rchar": 100}, False),
        ({"majflt": 3}, True),
        ({}, False),
    ],
)
def test_what_counts_as_motion(change: dict[str, float], moves: bool) -> None:
    server = Server()
    cases.loads_nothing(server)

    def sample(t: float) -> ProcessSample:
        base: dict[str, Any] = {"utime": 5.0, "stime": 1.0, "read_bytes": 10**9, "rchar": 10**9, "majflt": 7}
        grown = {name: base[name] + (value if t else 0) for name, value in change.items()}
        return ProcessSample(t=t, state="S", **(base | grown))

    server.processes = {W0: {"samples": tuple(sample(t) for t in TIMES)}}
    if "utime" in change:
        server.cpu = {W0: 0.9 / TIMES[-1]}
    assert bool(places(server)[W0].motion) is moves


def test_to_spin_in_a_wait_is_no_motion() -> None:
    server = Server()
    cases.all_in_nccl(server)
    assert not places(server)[W0].motion


def test_a_process_short_of_cpu_is_not_called_stuck() -> None:
    server = Server()
    cases.loads_nothing(server)
    server.states = {W0: "R"}
    assert diagnose(server.snapshot()).verdict.cause == "starting"


def test_shards_and_speed_stand_in_the_verdict_of_a_start_up() -> None:
    server = Server()
    cases.loads_slowly(server)
    verdict = diagnose(server.snapshot()).verdict
    assert verdict.cause == "starting"
    assert "loads weights: shard 2 of 4, 10.0 GB of 40.0 GB done (25%)" in verdict.summary
    assert "4.0 MB/s read" in verdict.summary


def test_shards_are_taken_from_the_log_where_no_file_is_mapped() -> None:
    server = Server()
    cases.loads_nothing(server)
    text = f"(Worker_TP0 pid={W0}) Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.0s/it]"
    server.fields = {"log_lines": (LogLine(file="/l", number=0, text=text),)}
    assert places(server)[W0].progress == "1 of 4 (log)"


def test_a_stopped_process_is_named_with_its_stage() -> None:
    server = standing_server()
    server.states = {W1: "T"}
    verdict = diagnose(server.snapshot()).verdict
    assert verdict.cause == "process-stopped"
    assert "stage of its start-up: meets the other ranks at the store" in verdict.evidence


def test_a_stopped_server_is_named_with_its_stage_too() -> None:
    server = standing_server()
    server.states = {API: "T"}
    assert "stage of its start-up: waits for its engines: 0 of 1 ready" in diagnose(server.snapshot()).verdict.evidence


def test_of_a_process_stopped_while_it_serves_no_stage_is_told() -> None:
    verdict = diagnose(Server(states={W1: "T"}).snapshot()).verdict
    assert verdict.cause == "process-stopped"
    assert not any("stage of its start-up" in words for words in verdict.evidence)


def test_a_dead_worker_is_named_with_the_stages_of_those_that_live() -> None:
    server = standing_server()
    server.states = {W1: ("S", "S", "Z")}
    verdict = diagnose(server.snapshot()).verdict
    assert verdict.cause == "worker-dead"
    assert any("Worker_TP0" in words and "meets the other ranks" in words for words in verdict.evidence)


def _nodes(rank: int) -> Server:
    server = standing_server()
    server.args = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29501", "--node-rank", str(rank))
    return server


def test_a_node_that_has_not_come_is_named_and_so_is_what_cannot_be_known() -> None:
    verdict = diagnose(_nodes(0).snapshot()).verdict
    assert (verdict.cause, verdict.subject.node) == ("startup-barrier", "node 1")
    assert verdict.chain[-1].subject.label == "node 1 of 2"
    assert any("cannot be known from here" in words for words in verdict.evidence)


def test_a_lock_that_a_dead_builder_left_is_said_to_be_one() -> None:
    server = Server()
    cases.lock_held_by_a_dead_one(server)
    server.fields = {"locks": (FileLock(path="/x/lock", kind="baton", stale=True, age_s=900.0),)}
    verdict = diagnose(server.snapshot()).verdict
    assert (verdict.cause, verdict.status) == ("jit-lock", "critical")
    assert "a dead process left behind" in verdict.summary


def test_a_lock_whose_holder_lives_is_a_warning() -> None:
    server = Server()
    cases.lock_held_by_a_dead_one(server)
    lock = FileLock(path="/x.lock", kind="FLOCK", holder=999, holder_comm="python3", holder_state="S")
    server.fields = {"locks": (lock,)}
    verdict = diagnose(server.snapshot()).verdict
    assert (verdict.cause, verdict.status) == ("jit-lock", "warning")
    assert "held by python3 999" in verdict.summary


def test_a_lock_of_a_cache_it_uses_is_told_from_locks_of_others() -> None:
    server = Server()
    cases.lock_held_by_a_dead_one(server)
    mine = FileLock(path="/cache/of/mine/locks/a.lock", kind="FLOCK", holder=999, holder_state="S")
    others = [FileLock(path=f"/tmp/{n}.lock", kind="FLOCK", holder=n, holder_state="S") for n in (777, 888)]
    server.fields = {"locks": (*others, mine)}
    server.processes = {API: {"environ": {"TORCHINDUCTOR_CACHE_DIR": "/cache/of/mine"}}}
    assert "/cache/of/mine/locks/a.lock, held by" in diagnose(server.snapshot()).verdict.summary
    server.processes = {}
    verdict = diagnose(server.snapshot()).verdict
    assert "waits for a lock file" in verdict.summary
    assert verdict.confidence == "medium"


def test_one_read_of_a_slow_disk_that_outlasts_the_window_is_no_fault_for_a_while() -> None:
    server = Server()
    cases.loads_nothing(server)
    server.states = {W0: "D"}
    server.processes = {W0: {"last_ran_s": 4.0}}
    verdict = diagnose(server.snapshot()).verdict
    assert verdict.cause == "starting", verdict.summary
    assert any("waits for storage since 4 s" in words for words in verdict.evidence)
    server.processes = {W0: {"last_ran_s": 40.0}}
    assert diagnose(server.snapshot()).verdict.cause == "process-uninterruptible"


def test_a_start_up_without_a_processor_is_not_called_stuck() -> None:
    server = Server()
    cases.at_the_store(server)
    delays = tuple(ProcessSample(t=t, state="S", utime=5.0, stime=1.0, run_delay=0.6 * t) for t in TIMES)
    server.processes = {W0: {"samples": delays}}
    assert diagnose(server.snapshot()).verdict.cause == "starting"


def test_one_frame_for_ten_minutes_at_full_cpu_is_a_warning_and_no_sooner() -> None:
    server = Server()
    cases.stands(server, cases.WARMS_UP, WORKER_IDLE)
    server.cpu = {W0: 1.0}
    server.age = 500.0
    assert diagnose(server.snapshot()).verdict.cause == "starting"
    server.age = 900.0
    verdict = diagnose(server.snapshot()).verdict
    assert (verdict.cause, verdict.status, verdict.confidence) == ("startup-phase-stuck", "warning", "low")


def test_a_compiler_may_be_in_one_frame_for_long() -> None:
    server = Server(age=3600.0, cpu={W0: 1.0})
    cases.stands(server, cases.COMPILES, WORKER_IDLE)
    server.cpu = {W0: 1.0}
    assert diagnose(server.snapshot()).verdict.cause == "starting"


def test_a_compiler_that_is_stopped_is_named() -> None:
    server = Server()
    cases.nobody_compiles(server)
    snapshot = server.snapshot()
    samples = tuple(ProcessSample(t=t, state="T") for t in TIMES)
    child = Process(pid=400, ppid=W0, comm="cc1plus", cmdline=("cc1plus", "x.cpp"), age_s=90.0, samples=samples)
    verdict = diagnose(msgspec.structs.replace(snapshot, processes=(*snapshot.processes, child))).verdict
    assert (verdict.cause, verdict.subject.pid) == ("slow-compile", W0)
    assert "its child cc1plus (pid 400) is in state T" in verdict.summary


def test_a_compiler_that_works_is_motion() -> None:
    server = Server()
    cases.nobody_compiles(server)
    snapshot = server.snapshot()
    samples = tuple(ProcessSample(t=t, state="R", utime=9.0 + t) for t in TIMES)
    child = Process(pid=400, ppid=W0, comm="cc1plus", cmdline=("cc1plus", "x.cpp"), age_s=90.0, samples=samples)
    verdict = diagnose(msgspec.structs.replace(snapshot, processes=(*snapshot.processes, child))).verdict
    assert verdict.cause == "starting"
    assert any("its child cc1plus (pid 400) works" in words for words in verdict.evidence)


def test_a_port_whose_listener_cannot_be_seen_may_be_its_own() -> None:
    server = Server()
    cases.engine_starts(server)
    hidden = Missing(what="descriptors", why="EACCES", next="run as root")
    server.processes = {API: {"socket_inodes": hidden}}
    server.fields = {"taken_ports": (msgspec.structs.replace(cases.TAKEN, pids=()),)}
    assert all(f.cause != "port-conflict" for f in diagnose(server.snapshot()).findings)


def test_nothing_is_said_of_a_start_up_that_cannot_be_seen() -> None:
    server = standing_server()
    server.stacks = dict.fromkeys((API, ENGINE, W0, W1), BLIND)
    assert diagnose(server.snapshot()).verdict.status == "unknown"


def test_a_server_that_was_born_this_second_is_starting() -> None:
    server = Server(listening=False, age=0.3, gone={ENGINE, W0, W1})
    server.stacks = {API: BLIND}
    server.processes = {API: {"socket_inodes": (), "n_fds": 3}}
    assert diagnose(server.snapshot()).verdict.cause == "starting"


def test_ps_shows_the_stage_while_it_starts_and_none_afterwards() -> None:
    starting = view(standing_server().snapshot())
    text = ps_text(starting, Style())
    assert "meets the other ranks at the store" in text
    assert "waits for its workers: 0 of 2" in text
    assert {m.stage for m in view(Server().snapshot()).members} == {""}


def test_engines_ready_by_their_stacks_are_named_and_identities_are_said_to_be_out_of_sight() -> None:
    server = Server(stacks={API: API_WAITS_START}, listening=False)
    verdict = diagnose(server.snapshot()).verdict
    assert verdict.cause == "handshake-incomplete"
    (words,) = [words for words in verdict.evidence if "identities" in words]
    assert words.startswith("ready by their stacks: EngineCore;")
    assert "not visible from outside" in words


def test_the_start_method_is_told_with_how_it_is_known_and_why_vllm_chose_it() -> None:
    server = standing_server()
    spawned = (("spawn_main", "multiprocessing/spawn.py"), ("<module>", "<string>"))
    for pid in (ENGINE, W0, W1):
        server.stacks[pid] = (*server.stacks[pid], *spawned)  # type: ignore[misc]
    override = (
        "WARNING 11-20 10:00:00 [system_utils.py:140] We must use the `spawn` multiprocessing start method. Overriding"
        " VLLM_WORKER_MULTIPROC_METHOD to 'spawn'. Reasons: CUDA is initialized"
    )
    server.fields["log_lines"] = (LogLine(file="node0.log", number=7, text=override),)
    evidence = diagnose(server.snapshot()).verdict.evidence
    assert "started by spawn: EngineCore, Worker_TP0, Worker_TP1 (their stacks begin so)" in evidence
    assert "vLLM chose spawn by itself: CUDA is initialized" in evidence

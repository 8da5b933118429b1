"""Every cause: the evidence that makes the verdict, and the look-alike that must not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from vllmdiag.catalogue.entries import catalogue
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.process import Cgroup, Limits
from vllmdiag.model.shm import Holder, Segment
from vllmdiag.model.sockets import ProbeOutcome, ZmtpProbe

from . import gpu_cases, log_cases, startup_cases
from .scenario import (
    API,
    API_WAITS_START,
    ENGINE,
    ENGINE_BLOCKED,
    ENGINE_IDLE,
    ENGINE_RUNS_MODEL,
    ENGINE_WAITS,
    ENGINE_WAITS_START,
    INPUT_POLLS,
    INPUT_STUCK,
    MIB,
    OUTPUT_SENDS,
    OUTPUT_WAITS,
    WORKER0,
    WORKER_ALL_GATHER,
    WORKER_ALL_REDUCE,
    WORKER_IDLE,
    WORKER_IN_STORE,
    WORKER_METHOD,
    Server,
)

W0, W1 = WORKER0, WORKER0 + 1
BLIND = Missing(what="stacks", why="EPERM", next="run as root")
Scenario = Callable[[Server], None]


def judged(change: Scenario | None = None, **fields: object) -> Diagnosis:
    """The diagnosis of a server after a change."""
    server = Server(**fields)  # type: ignore[arg-type]
    if change is not None:
        change(server)
    return diagnose(server.snapshot())


def stalled(server: Server) -> None:
    """A request runs, the engine waits for its workers, rank 0 is in the collective: who is missing, the test says."""
    server.stacks = {ENGINE: ENGINE_WAITS, W0: WORKER_ALL_REDUCE, W1: WORKER_IDLE}
    server.cpu = {W0: 1.0}
    server.metrics = (
        {"num_requests_running": 1, "generation_tokens_total": 5},
        {"num_requests_running": 1, "generation_tokens_total": 5},
    )


def worker_stopped(server: Server) -> None:
    stalled(server)
    server.states[W1] = "T"
    server.broadcast = [server.ring({5: [1]})]


def worker_stopped_all_read(server: Server) -> None:
    stalled(server)
    server.states[W1] = "T"


def engine_stopped(server: Server) -> None:
    server.states[ENGINE] = "T"
    server.input_backlog = 387


def api_stopped(server: Server) -> None:
    server.states[API] = "T"
    server.health = None


def traced(server: Server) -> None:
    server.states[W0] = "t"
    server.processes[W0] = {"tracer_pid": 4711}


def worker_zombie(server: Server) -> None:
    stalled(server)
    server.states[W1] = ["S", "Z", "Z"]
    server.stacks[W1] = BLIND


def worker_vanished_before(server: Server) -> None:
    stalled(server)
    server.gone = {W1}


def worker_vanished_and_the_rest_followed(server: Server) -> None:
    """The server gives up within the window: the first to die was gone before it began."""
    server.gone = {W1}
    server.states = {W0: ["S", "", ""], ENGINE: ["S", "S", ""], API: ["S", "S", ""]}


def all_workers_vanished(server: Server) -> None:
    stalled(server)
    server.gone = {W0, W1}


def engine_gone(server: Server) -> None:
    server.gone = {ENGINE, W0, W1}


def engine_died_in_window(server: Server) -> None:
    server.states = {ENGINE: ["S", "", ""], W0: ["S", "S", ""], W1: ["S", "S", ""], API: ["S", "S", ""]}


def workers_left_alone(server: Server) -> None:
    server.gone = {ENGINE}
    server.no_api = True
    server.states[W1] = "T"
    for pid in (W0, W1):
        server.processes[pid] = {"ppid": 1}


def workers_left_by_a_zombie_server(server: Server) -> None:
    """The server is dead and not reaped, its engine gone, one worker stopped."""
    server.gone = {ENGINE}
    server.states = {API: "Z", W1: "T"}
    for pid in (W0, W1):
        server.processes[pid] = {"ppid": 1}


def orphaned(server: Server) -> None:
    server.no_api = True
    server.ppid_engine = 1


def api_died_in_window(server: Server) -> None:
    server.states[API] = ["S", "", ""]


def unkillable(server: Server) -> None:
    server.no_api = True
    server.ppid_engine = 1
    server.states[ENGINE] = "R"
    server.processes[ENGINE] = {"sigkill_pending": True}


def uninterruptible(server: Server) -> None:
    stalled(server)
    server.states[W1] = "D"


def ring_full(server: Server) -> None:
    server.stacks = {ENGINE: ENGINE_BLOCKED, W1: WORKER_METHOD}
    server.cpu = {ENGINE: 1.0}
    server.broadcast = [server.ring({slot: [1] for slot in range(10)})]


def ring_full_seen_in_a_torn_stack(server: Server) -> None:
    """EngineCore spins in acquire_write; one look shows frames that say nothing."""
    ring_full(server)
    torn = (("ShmRingBuffer.get_metadata", "vllm/distributed/device_communicators/shm_broadcast.py"), *ENGINE_IDLE[2:])
    server.stacks[ENGINE] = [ENGINE_BLOCKED, ENGINE_BLOCKED, torn]


def server_gives_up(server: Server) -> None:
    """The ranks have failed, vLLM knows it and is about to end."""
    server.health = 503


def asleep(server: Server) -> None:
    stalled(server)
    server.version = "0.23.0"
    server.broadcast = [server.ring({4: [1]})]


def everybody_waits(server: Server) -> None:
    stalled(server)
    server.stacks[W0] = WORKER_IDLE
    server.cpu = {}


def rank_not_seen(server: Server) -> None:
    stalled(server)
    server.stacks[W1] = BLIND


def reply_left(server: Server) -> None:
    server.replies = {1: [b"\x01\x01" * 9 + b"\x01\x00"]}


def worker_in_method(server: Server) -> None:
    server.stacks = {ENGINE: ENGINE_WAITS, W1: WORKER_METHOD}
    server.cpu = {W1: 1.0}


def input_stuck(server: Server) -> None:
    server.threads["Thread-1 (process_input_sockets)"] = INPUT_STUCK


def input_dead(server: Server) -> None:
    server.threads["Thread-1 (process_input_sockets)"] = None


def remote_kv(server: Server) -> None:
    server.args = ("--kv-transfer-config", "{}")
    server.metrics = ({"num_requests_running": 1}, {"num_requests_running": 1})


def small_shm(server: Server) -> None:
    server.shm_size = server.shm_free = 64 * MIB
    server.stacks = {API: API_WAITS_START, ENGINE: ENGINE_WAITS_START}
    server.listening = False


def full_shm(server: Server) -> None:
    server.shm_free = 0


def _leak(resident: int) -> Segment:
    return Segment(
        path="/dev/shm/psm_0a1b2c3d", dev=1, ino=99, size=10 * (16 * MIB + 3), resident=resident, holders_complete=True
    )


def heavy_leaks(server: Server) -> None:
    server.shm_size = 1 << 30
    server.extra_segments = (_leak(700 * MIB),)


def diverged(server: Server) -> None:
    server.stacks = {ENGINE: ENGINE_WAITS, W0: WORKER_IDLE, W1: WORKER_ALL_REDUCE}


def different_collectives(server: Server) -> None:
    server.stacks = {ENGINE: ENGINE_WAITS, W0: WORKER_ALL_GATHER, W1: WORKER_ALL_REDUCE}


def loop_blocked(server: Server) -> None:
    server.health = None
    server.stacks[API] = (
        ("JSONEncoder.encode", "json/encoder.py"),
        ("create_chat", "app.py"),
        ("run", "uvloop/__init__.py"),
    )
    server.cpu[API] = 1.0


def deaf_client(server: Server) -> None:
    server.send_q = (490_000, 490_000, 490_000)


def client_left(server: Server) -> None:
    moving(server)
    server.send_q, server.http_states = (0, 0, 0), ("CLOSE-WAIT",) * 3


def client_is_leaving(server: Server) -> None:
    client_left(server)
    server.http_states = ("ESTAB", "CLOSE-WAIT", "CLOSE-WAIT")


def client_left_an_idle_server(server: Server) -> None:
    server.send_q, server.http_states = (0, 0, 0), ("CLOSE-WAIT",) * 3


def outputs_not_read(server: Server) -> None:
    server.threads["Thread-2 (process_output_sockets)"] = OUTPUT_SENDS
    server.output_backlog = (4000, 4000, 4000)


def outputs_kept_in_memory(server: Server) -> None:
    """Three steps a round of the ring, nothing counted, and the server grows."""
    stalled(server)
    server.broadcast = [server.ring({(n // 2) % 10: [0, 1] if n % 2 else []}) for n in range(60)]
    same = {"num_requests_running": 1.0, "generation_tokens_total": 5.0, "kv_cache_usage_perc": 0.25}
    server.metrics = (same, same)
    server.rss = (1 << 30, (1 << 30) + 4096, (1 << 30) + 8192)


def a_prefill_in_chunks(server: Server) -> None:
    """No token yet, but the cache fills."""
    outputs_kept_in_memory(server)
    server.metrics = (server.metrics[0], {**server.metrics[0], "kv_cache_usage_perc": 0.5}) if server.metrics else None


def steps_and_a_server_that_does_not_grow(server: Server) -> None:
    outputs_kept_in_memory(server)
    server.rss = (1 << 30, 1 << 30, (1 << 30) + 8192)


def an_old_release_without_figures_of_the_cache(server: Server) -> None:
    outputs_kept_in_memory(server)
    same = {"num_requests_running": 1.0, "generation_tokens_total": 5.0}
    server.metrics = (same, same)


def sends_once(server: Server) -> None:
    outputs_not_read(server)
    server.threads["Thread-2 (process_output_sockets)"] = [OUTPUT_WAITS, OUTPUT_SENDS, OUTPUT_WAITS]


def outputs_read_between_two_looks(server: Server) -> None:
    server.output_backlog = (4000, 0, 4000)


def start_waits(server: Server) -> None:
    server.stacks = {API: API_WAITS_START, ENGINE: ENGINE_WAITS_START, W0: WORKER_IN_STORE, W1: WORKER_IN_STORE}
    server.listening = False


def disconnected(server: Server) -> None:
    server.connected = False


def broken_flags(server: Server) -> None:
    server.broadcast = [bytes([7, 7, 7] * 10)]


def paths_removed(server: Server) -> None:
    server.ipc_paths_missing = ("/tmp/in",)


def rings_unlinked(server: Server) -> None:
    server.unlinked = True


def rings_unlinked_by_an_engine_that_ends(server: Server) -> None:
    """It has left its loop: it removes what it made."""
    server.unlinked = True
    server.stacks[ENGINE] = (
        ("MultiprocExecutor.shutdown", "vllm/v1/executor/multiproc_executor.py"),
        *ENGINE_IDLE[-2:],
    )


def a_semaphore_unlinked(server: Server) -> None:
    """Its maker unlinks it at once, and so it is meant."""
    held = (Holder(pid=ENGINE, fds=(11,)), Holder(pid=W0, fds=(11,)))
    server.extra_segments = (
        Segment(path="/dev/shm/sem.mp-x1", dev=1, ino=98, size=32, resident=4096, deleted=True, holders=held),
    )


def _fds(used: int) -> dict[str, object]:
    return {"n_fds": used, "limits": Limits(nofile=1024)}


def no_descriptor_left(server: Server) -> None:
    server.processes[API] = _fds(1024)


def hardly_a_descriptor_left(server: Server) -> None:
    server.processes[API] = _fds(1024 - 63)


def just_descriptors_enough(server: Server) -> None:
    server.processes[API] = _fds(1024 - 64)


def _pids(current: int, most: int | None) -> dict[str, object]:
    return {"cgroup": Cgroup(path="/vllm", version=2, pids_current=current, pids_max=most)}


def no_thread_left(server: Server) -> None:
    server.processes = {API: _pids(90, None), ENGINE: _pids(512, 512), W0: _pids(512, 512)}


def hardly_a_thread_left_in_the_group_of_a_worker(server: Server) -> None:
    server.processes = {ENGINE: _pids(300, 4096), W1: _pids(4056, 4096)}


def just_threads_enough(server: Server) -> None:
    server.processes = {ENGINE: _pids(4096 - 41, 4096), API: _pids(512 - 8, 512)}


def _probe(outcome: ProbeOutcome, inode: int = 1000) -> ZmtpProbe:
    reason = "" if outcome == "ready" else "it accepts and says nothing for 1 s"
    return ZmtpProbe(endpoint="ipc:///tmp/in", inode=inode, owner=API, outcome=outcome, reason=reason, next="look")


def accepts_and_says_nothing(server: Server) -> None:
    server.zmtp = (_probe("ready", 999), _probe("silent"))


def tells_its_type(server: Server) -> None:
    server.zmtp = (_probe("ready"),)


def is_not_asked(server: Server) -> None:
    server.zmtp = (_probe("gated"), _probe("gated", 999))


FAULTS: list[tuple[str, Scenario, str, str | None]] = [
    *startup_cases.FAULTS,
    *log_cases.FAULTS,
    *gpu_cases.FAULTS,
    ("process-stopped", worker_stopped, "Worker_TP1", "critical"),
    ("process-stopped", worker_stopped_all_read, "Worker_TP1", "critical"),
    ("process-stopped", engine_stopped, "EngineCore", "critical"),
    ("process-stopped", api_stopped, "APIServer", "critical"),
    ("process-stopped", traced, "Worker_TP0", "critical"),
    ("worker-dead", worker_zombie, "Worker_TP1", "critical"),
    ("worker-dead", worker_vanished_before, "Worker_TP1", "critical"),
    ("worker-dead", worker_vanished_and_the_rest_followed, "Worker_TP1", "critical"),
    ("worker-dead", all_workers_vanished, "Worker_TP0", "critical"),
    ("engine-dead", engine_gone, "EngineCore", "critical"),
    ("engine-dead", engine_died_in_window, "EngineCore", "critical"),
    ("engine-dead", workers_left_alone, "EngineCore", "critical"),
    ("engine-dead", workers_left_by_a_zombie_server, "EngineCore", "critical"),
    ("orphan-engine", orphaned, "EngineCore", "critical"),
    ("orphan-engine", api_died_in_window, "EngineCore", "critical"),
    ("driver-unkillable", unkillable, "EngineCore", "critical"),
    ("process-uninterruptible", uninterruptible, "Worker_TP1", "critical"),
    ("ring-full-slow-reader", ring_full, "Worker_TP1", "critical"),
    ("ring-full-slow-reader", ring_full_seen_in_a_torn_stack, "Worker_TP1", "critical"),
    ("engine-dead", server_gives_up, "EngineCore", "critical"),
    ("lost-wakeup", asleep, "Worker_TP1", "critical"),
    ("lost-message", everybody_waits, "EngineCore", "critical"),
    ("rank-never-answered", rank_not_seen, "Worker_TP1", "critical"),
    ("response-skew", reply_left, "Worker_TP1", "critical"),
    ("worker-busy", worker_in_method, "Worker_TP1", "warning"),
    ("input-thread-stuck", input_stuck, "EngineCore", "critical"),
    ("input-thread-dead", input_dead, "EngineCore", "critical"),
    ("wait-remote-kv", remote_kv, "EngineCore", "critical"),
    ("shm-too-small", small_shm, "EngineCore", "critical"),
    ("shm-exhausted", full_shm, "EngineCore", "critical"),
    ("shm-full-of-leaks", heavy_leaks, "/dev/shm", "critical"),
    ("shm-unlinked-early", rings_unlinked, "EngineCore", "warning"),
    ("collective-divergence", diverged, "Worker_TP0", "critical"),
    ("collective-divergence", different_collectives, None, "critical"),  # type: ignore[list-item]
    ("api-loop-blocked", loop_blocked, "APIServer", "critical"),
    ("client-not-reading", deaf_client, "client 10.0.0.9:41000", "warning"),
    ("abort-not-seen", client_left, "client 10.0.0.9:41000", "warning"),
    ("api-not-reading", outputs_not_read, "APIServer", "critical"),
    ("api-not-reading", outputs_kept_in_memory, "APIServer", "critical"),
    ("endpoint-gone", disconnected, "EngineCore", "critical"),
    ("ring-inconsistent", broken_flags, "EngineCore", "critical"),
    ("fd-exhausted", no_descriptor_left, "APIServer", "critical"),
    ("fd-exhausted", hardly_a_descriptor_left, "APIServer", "warning"),
    ("pids-limit", no_thread_left, "EngineCore", "critical"),
    ("pids-limit", hardly_a_thread_left_in_the_group_of_a_worker, "Worker_TP1", "warning"),
    ("zmq-io-silent", accepts_and_says_nothing, "APIServer", "critical"),
]


@pytest.mark.parametrize(("cause", "change", "subject", "status"), FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_the_evidence_of_a_cause_gives_its_verdict(
    cause: str, change: Scenario, subject: str | None, status: str
) -> None:
    found = judged(change)
    assert found.verdict.cause == cause, found.verdict.summary
    assert found.verdict.status == status
    assert found.verdict.layer == catalogue()[cause].layer
    assert found.verdict.evidence
    assert found.verdict.next
    if subject is not None:
        assert found.verdict.subject.label == subject
    if found.verdict.layer:
        assert found.layers[found.verdict.layer - 1].status == "fault"


def moving(server: Server) -> None:
    """The same stacks as a stall, but messages flow."""
    stalled(server)
    server.broadcast = [server.ring({slot: [0, 1]}) for slot in range(8)]


def worker_sleeps(server: Server) -> None:
    """S is not T: a worker that waits is not stopped."""


def stopped_for_a_moment(server: Server) -> None:
    server.states[W1] = ["T", "S", "S"]


def engine_under_script(server: Server) -> None:
    server.processes[API] = {"cmdline": ("/v/bin/python", "batch.py"), "exe": "/v/bin/python3.11"}


def killed_this_instant(server: Server) -> None:
    """SIGKILL pending, but user time runs on: it is about to die."""
    server.processes[W1] = {"sigkill_pending": True}
    server.states[W1] = "R"
    server.cpu[W1] = 1.0


def reading_disk(server: Server) -> None:
    server.states[W1] = ["D", "S", "D"]


def young_start(server: Server) -> None:
    start_waits(server)
    server.age = 4.0


def starting_busily(server: Server) -> None:
    start_waits(server)
    server.cpu = {W0: 0.9, W1: 0.9}


def overcommitted_shm(server: Server) -> None:
    """400 MiB for 664 MiB of sparse rings: starts and serves."""
    server.shm_size = server.shm_free = 400 * MIB


def full_but_resident(server: Server) -> None:
    """No room left, and no hole left either: nothing can fail."""
    server.shm_free = 0
    server.resident = 10 * (24 * MIB + 2)


def workers_not_spawned_yet(server: Server) -> None:
    start_waits(server)
    server.cpu = {ENGINE: 1.0}
    server.gone = {W1}


def engine_not_spawned_yet(server: Server) -> None:
    server.stacks = {API: API_WAITS_START}
    server.cpu = {API: 1.0}
    server.gone = {ENGINE, W0, W1}
    server.listening = False


def ring_full_for_a_moment(server: Server) -> None:
    ring_full(server)
    server.broadcast = [
        server.ring({slot: [1] for slot in range(10)}),
        server.ring({slot: [1] for slot in range(1, 10)}),
    ]


def taken_late(server: Server) -> None:
    """The reader overslept, and then took the message."""
    asleep(server)
    server.broadcast = [server.ring({4: [1]}), server.ring({})]


def waiting_but_counting(server: Server) -> None:
    everybody_waits(server)
    server.metrics = ({"generation_tokens_total": 5}, {"generation_tokens_total": 9})


def not_seen_but_answering(server: Server) -> None:
    rank_not_seen(server)
    server.broadcast = [server.ring({4: [1]}), server.ring({})]


def decoding_once(server: Server) -> None:
    """The input thread decodes a request in one dump of three."""
    server.threads["Thread-1 (process_input_sockets)"] = [INPUT_POLLS, INPUT_STUCK, INPUT_POLLS]


def threads_not_started_yet(server: Server) -> None:
    starting_busily(server)
    server.threads = dict.fromkeys(server.threads)


def connector_without_requests(server: Server) -> None:
    server.args = ("--kv-transfer-config", "{}")


def a_torn_look(server: Server) -> None:
    server.broadcast = [bytes([7, 7, 7] * 10), server.ring({})]


def few_leaks(server: Server) -> None:
    server.extra_segments = (_leak(40960),)


def held_segment(server: Server) -> None:
    server.extra_segments = (msgspec.structs.replace(_leak(900 * MIB), holders_complete=False),)
    server.shm_size = 1 << 30


def draining_client(server: Server) -> None:
    server.send_q = (490_000, 200_000, 0)


def slow_health_but_changing(server: Server) -> None:
    loop_blocked(server)
    first = (("JSONEncoder.encode", "json/encoder.py"), ("run", "uvloop/__init__.py"))
    second = (("Tokenizer.encode", "tokenizers/x.py"), ("run", "uvloop/__init__.py"))
    server.stacks[API] = [first, second, first]
    moving(server)
    server.stacks[API] = [first, second, first]


def reply_in_time(server: Server) -> None:
    server.replies = {1: [b"\x01\x01" * 9 + b"\x01\x00", b"\x01\x01" * 10]}


def changing_worker(server: Server) -> None:
    worker_in_method(server)
    other = (("Tensor.sum", "torch/_tensor.py"), *WORKER_METHOD)
    server.stacks[W1] = [WORKER_METHOD, other, WORKER_METHOD]


LOOK_ALIKES: list[tuple[str, Scenario, str]] = [
    *startup_cases.LOOK_ALIKES,
    *log_cases.LOOK_ALIKES,
    *gpu_cases.LOOK_ALIKES,
    ("process-stopped", worker_sleeps, "idle"),
    ("process-stopped", stopped_for_a_moment, "idle"),
    ("collective-divergence", moving, "serving"),
    ("orphan-engine", engine_under_script, "idle"),
    ("driver-unkillable", killed_this_instant, "idle"),
    ("process-uninterruptible", reading_disk, "idle"),
    ("handshake-incomplete", young_start, "starting"),
    ("handshake-incomplete", starting_busily, "starting"),
    ("shm-too-small", overcommitted_shm, "idle"),
    ("shm-full-of-leaks", few_leaks, "idle"),
    ("shm-full-of-leaks", held_segment, "idle"),
    ("shm-unlinked-early", a_semaphore_unlinked, "idle"),
    ("shm-unlinked-early", rings_unlinked_by_an_engine_that_ends, "busy"),
    ("client-not-reading", draining_client, "idle"),
    ("api-not-reading", sends_once, "idle"),
    ("api-not-reading", outputs_read_between_two_looks, "idle"),
    ("api-not-reading", a_prefill_in_chunks, "serving"),
    ("api-not-reading", steps_and_a_server_that_does_not_grow, "serving"),
    ("api-not-reading", an_old_release_without_figures_of_the_cache, "serving"),
    ("abort-not-seen", client_is_leaving, "serving"),
    ("abort-not-seen", client_left_an_idle_server, "idle"),
    ("api-loop-blocked", slow_health_but_changing, "serving"),
    ("response-skew", reply_in_time, "serving"),
    ("worker-busy", changing_worker, "busy"),
    ("endpoint-gone", paths_removed, "idle"),
    ("worker-dead", workers_not_spawned_yet, "starting"),
    ("engine-dead", engine_not_spawned_yet, "starting"),
    ("ring-full-slow-reader", ring_full_for_a_moment, "serving"),
    ("lost-wakeup", taken_late, "serving"),
    ("lost-message", waiting_but_counting, "serving"),
    ("rank-never-answered", not_seen_but_answering, "serving"),
    ("input-thread-stuck", decoding_once, "idle"),
    ("input-thread-dead", threads_not_started_yet, "starting"),
    ("wait-remote-kv", connector_without_requests, "idle"),
    ("shm-exhausted", full_but_resident, "idle"),
    ("ring-inconsistent", a_torn_look, "serving"),
    ("fd-exhausted", just_descriptors_enough, "idle"),
    ("pids-limit", just_threads_enough, "idle"),
    ("zmq-io-silent", tells_its_type, "idle"),
    ("zmq-io-silent", is_not_asked, "idle"),
]


@pytest.mark.parametrize(("cause", "change", "expected"), LOOK_ALIKES, ids=lambda v: getattr(v, "__name__", None))
def test_a_look_alike_is_not_taken_for_the_cause(cause: str, change: Scenario, expected: str) -> None:
    found = judged(change)
    assert found.verdict.cause == expected, found.verdict.summary
    assert found.verdict.status == "ok"
    assert all(f.cause != cause or f.severity == "info" for f in found.findings)


def test_idle_is_said_only_when_everybody_was_seen_idle() -> None:
    assert judged().verdict.cause == "idle"


def test_a_blind_look_is_unknown_and_never_healthy() -> None:
    blind = judged(stacks=dict.fromkeys((API, ENGINE, W0, W1), BLIND))
    assert (blind.verdict.status, blind.verdict.cause) == ("unknown", "unknown")


def test_idle_stacks_without_rings_and_counters_prove_no_idleness() -> None:
    blind = judged(polled=False)
    assert (blind.verdict.status, blind.verdict.cause) == ("unknown", "unknown")
    assert "as root" in blind.verdict.summary
    none = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
    assert judged(polled=False, metrics=(none, none)).verdict.cause == "idle"


def test_one_blind_worker_is_enough_to_withhold_idle() -> None:
    assert judged(stacks={W1: BLIND}).verdict.status == "unknown"


def test_a_stopped_process_is_named_even_when_nothing_else_can_be_seen() -> None:
    found = judged(stacks=dict.fromkeys((API, ENGINE, W0, W1), BLIND), states={ENGINE: "T"})
    assert found.verdict.cause == "process-stopped"
    assert found.verdict.subject.label == "EngineCore"


def test_the_chain_leads_from_the_client_through_the_waiting_rank_to_the_root() -> None:
    chain = judged(worker_stopped).verdict.chain
    assert [link.subject.label for link in chain] == ["client", "APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"]
    assert chain[3].doing == "all_reduce"


def test_the_waiters_are_folded_under_the_root_and_never_blamed() -> None:
    found = judged(worker_stopped)
    assert found.verdict.subject.pid == W1
    assert all(f.folded_into == "process-stopped" for f in found.findings[1:] if f.severity != "info")


def test_socket_files_removed_under_a_running_server_are_a_finding_and_no_fault() -> None:
    found = judged(paths_removed)
    assert found.verdict.cause == "idle"
    assert [f.cause for f in found.findings] == ["ipc-path-removed"]


def test_an_old_version_without_titles_is_read_by_its_tree() -> None:
    def change(server: Server) -> None:
        worker_stopped(server)

    found = judged(change, titles=False, version="0.9.2")
    assert (found.verdict.cause, found.verdict.subject.label) == ("process-stopped", "Worker_TP1")


def test_everybody_idle_in_a_stack_of_idle_engine_names_itself_idle_with_evidence() -> None:
    verdict = judged(stacks={ENGINE: ENGINE_IDLE}).verdict
    assert any("no unread" in words for words in verdict.evidence)


def test_without_worker_and_ring_an_idle_engine_is_idle_as_tp1_on_gpus_always_is() -> None:
    found = judged(uniproc=True, tp=1)
    assert found.verdict.cause == "idle"
    assert [layer.status for layer in found.layers] == ["ok"] * 5
    assert "runs the model itself" in found.layers[2].summary


def test_an_engine_that_runs_the_model_itself_serves_while_its_counters_move() -> None:
    counted = ({"generation_tokens_total": 5.0}, {"generation_tokens_total": 9.0})
    found = judged(uniproc=True, tp=1, stacks={ENGINE: ENGINE_RUNS_MODEL}, metrics=counted)
    assert found.verdict.cause == "serving"


def test_an_engine_alone_that_waits_for_the_gpu_for_ever_is_a_stall_of_layer_4_not_decided_further() -> None:
    running = {"num_requests_running": 1.0, "generation_tokens_total": 5.0}
    verdict = judged(uniproc=True, tp=1, stacks={ENGINE: ENGINE_RUNS_MODEL}, metrics=(running, running)).verdict
    assert (verdict.status, verdict.cause, verdict.layer) == ("critical", "unknown", 4)
    assert "GPU" in verdict.summary


def test_a_rank_that_is_gone_stands_at_the_end_of_the_chain_though_it_has_no_pid() -> None:
    chain = judged(worker_vanished_before).verdict.chain
    assert [link.subject.label for link in chain] == ["client", "APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"]
    assert chain[-1].subject.pid is None


def test_a_missing_rank_is_known_from_the_arguments_where_no_ring_can_be_read() -> None:
    def change(server: Server) -> None:
        worker_vanished_before(server)
        server.polled = False

    assert judged(change).verdict.cause == "worker-dead"


def test_a_full_table_of_descriptors_is_an_echo_of_the_stall_that_filled_it() -> None:
    def change(server: Server) -> None:
        no_descriptor_left(server)
        worker_stopped(server)

    found = judged(change)
    assert found.verdict.cause == "process-stopped"
    assert [f.folded_into for f in found.findings if f.cause == "fd-exhausted"] == ["process-stopped"]


def test_what_was_not_probed_is_missing_and_what_answered_is_counted() -> None:
    assert [(hole.what, hole.next) for hole in judged(is_not_asked).missing] == [("2 ZMQ endpoints", "look")]
    assert judged(tells_its_type).layers[1].summary.endswith(", 1 of 1 probed answer")
    assert "probed" not in judged(is_not_asked).layers[1].summary


def test_a_stopped_owner_explains_its_silence() -> None:
    def change(server: Server) -> None:
        accepts_and_says_nothing(server)
        server.states[API] = "T"

    assert {f.cause for f in judged(change).findings} & {"zmq-io-silent"} == set()


def test_an_idle_engine_behind_a_server_that_does_not_answer_is_not_called_healthy() -> None:
    verdict = judged(health=None).verdict
    assert (verdict.status, verdict.cause) == ("unknown", "unknown")
    assert "/health" in verdict.summary


def test_a_server_that_gets_no_processor_is_slow_and_not_stuck() -> None:
    def change(server: Server) -> None:
        stalled(server)
        server.stacks[W1] = WORKER_ALL_REDUCE
        server.run_delay = {W0: 0.8, W1: 0.6}

    verdict = judged(change).verdict
    assert (verdict.status, verdict.cause) == ("ok", "busy")
    assert "short of CPU" in verdict.summary


def test_waiters_that_spin_for_a_processor_do_not_excuse_the_one_they_wait_for() -> None:
    def change(server: Server) -> None:
        worker_in_method(server)
        server.run_delay = {ENGINE: 0.7, W0: 0.7, W1: 0.5}

    assert judged(change).verdict.cause == "worker-busy"


@pytest.mark.parametrize(
    ("cores", "delay", "expected"),
    [(0.9, 0.0, ("critical", "unknown")), (0.9, 0.15, ("ok", "busy")), (0.0, 0.0, ("critical", "unknown"))],
)
def test_ranks_in_one_collective_may_be_in_a_step_where_the_processor_is_short(
    cores: float, delay: float, expected: tuple[str, str]
) -> None:
    def change(server: Server) -> None:
        stalled(server)
        server.stacks[W1] = WORKER_ALL_REDUCE
        server.cpu = {W0: cores, W1: cores}
        server.run_delay = {W1: delay}

    verdict = judged(change).verdict
    assert (verdict.status, verdict.cause) == expected

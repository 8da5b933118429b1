from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.catalogue.playbooks import playbooks
from vllmdiag.catalogue.symptoms import known_lines, match

WAIT = "No available shared memory broadcast block found in 60 seconds."


def _causes(text: str) -> list[str]:
    return [found.book.cause for found in match(text)]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "worker-dead"),
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -7), shutting down executor.", "shm-exhausted"),
        ("RuntimeError: Insufficient space in /dev/shm for x: 160 MiB required, 64 MiB free.", "shm-too-small"),
        ("AttributeError: 'int' object has no attribute 'sampled_token_ids'", "response-skew"),
        ("Waiting for 0 local, 1 remote core engine proc(s) to connect.", "handshake-incomplete"),
        ("still in WAITING_FOR_REMOTE_KVS state", "wait-remote-kv"),
        (f"INFO 12-01 [shm_broadcast.py:750] {WAIT}", "ring-full-slow-reader"),
        ("There appear to be 3 leaked shared_memory objects to clean up", "shm-full-of-leaks"),
        ("the server hangs after idle for an hour", "lost-wakeup"),
        ("GPU memory still used after kill -9 of the api server", "orphan-engine"),
        ("kill -9 has no effect on the process", "driver-unkillable"),
        ("docker shm size is 64m and I get a bus error", "shm-too-small"),
        ("one client hangs, its Send-Q is full", "client-not-reading"),
        ("health check times out, event loop blocked", "api-loop-blocked"),
        ("somebody pressed ctrl-z", "process-stopped"),
        ("new requests vanish, py-spy shows popitem in process_input_sockets", "input-thread-stuck"),
        ("NCCL hang: ranks differ", "collective-divergence"),
        ("loading weights is slow", "starting"),
    ],
)
def test_a_log_line_or_a_symptom_in_words_finds_its_playbook(text: str, cause: str) -> None:
    assert _causes(text)[0] == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("api server was killed but the engine core is still there and holds VRAM, next start fails", "orphan-engine"),
        ("EngineCore ignores kill -9 and the card is unusable until we reboot the machine", "driver-unkillable"),
        ("Ray never gets the placement group, tp is larger than the gpus of a node", "ray-placement"),
        ("gloo connects to 127.0.0.1 of the other machine, the hostname resolves to loopback", "wrong-interface"),
        ("the pod asked for 20Gi of shm but df shows 64M in the container", "shm-too-small"),
        ("after a crash /dev/shm is full of old files and every restart fails", "shm-full-of-leaks"),
        ("decode instance has requests waiting for KV of the prefill side for ever", "wait-remote-kv"),
        ("stream comes in bursts behind nginx, direct access to the port is fine", "proxy-buffering"),
        ("the probe of localhost goes through HTTP_PROXY and fails", "proxy-env"),
        ("client gave up long ago but the server still generates for it", "abort-not-seen"),
        ("ZMQError too many open files at about a thousand concurrent requests", "fd-exhausted"),
        ("pthread_create fails with EAGAIN although ulimit -u is unlimited", "pids-limit"),
        ("scratch directory has a long path and zmq refuses the ipc path", "ipc-path-too-long"),
        ("hangs in torch.compile for a long time at start", "slow-compile"),
        ("first all-reduce never returns, NCCL_P2P_DISABLE=1 makes it start", "p2p-broken"),
        ("CUDA error 802 system not yet initialized", "fabric-manager"),
        ("ncclCommInitRank hangs, some ranks never reach init complete", "nccl-init-stuck"),
        ("the json schema is huge and its grammar compiles for hours at 100 % cpu", "grammar-busy"),
        ("running 0, waiting 3, engine at 100 % cpu, KV blocks are held by finished requests", "scheduler-livelock"),
        ("aborted request without a reason after ten minutes behind the load balancer", "client-abort-silent"),
        ("weights are on NFS and the shards load slowly, it looks hung", "starting"),
        ("load average 2000 and 98 % system time on the host", "host-overloaded"),
    ],
)  # fmt: skip
def test_what_people_write_finds_its_playbook_among_the_first_three(text: str, cause: str) -> None:
    assert cause in _causes(text)[:3]


@pytest.mark.parametrize(
    "text", ["please help", "it hangs", "", "   \n\n", "xyzzy", "the quick brown fox", "INFO: all is as it should be"]
)
def test_what_says_nothing_finds_nothing(text: str) -> None:
    assert match(text) == ()


def test_every_playbook_is_found_by_each_of_its_own_words() -> None:
    for book in playbooks().values():
        for phrase in (book.title, *book.keywords):
            assert book.cause in _causes(phrase), phrase


def test_the_words_of_the_long_wait_are_told_apart_by_their_line_number() -> None:
    writer, reader = (f"[shm_broadcast.py:{n}] {WAIT}" for n in (750, 871))
    assert _causes(writer) == ["ring-full-slow-reader"]
    assert "ring-full-slow-reader" not in _causes(reader)
    assert [line.echo for line in (*known_lines(writer), *known_lines(reader))] == [False, True]
    assert {"ring-full-slow-reader", "lost-message"} <= set(_causes(WAIT))


def test_a_cause_outweighs_its_echoes_wherever_it_stands_in_the_log() -> None:
    cause = "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"
    echoes = ["RPC call to execute_model timed out", "EngineDeadError", WAIT]
    assert _causes("\n".join([cause, *echoes]))[0] == "worker-dead"
    assert _causes("\n".join([*echoes, cause]))[0] == "worker-dead"
    assert [line.echo for line in known_lines("\n".join([cause, *echoes]))] == [False, True, True, True]


def test_a_line_that_comes_a_thousand_times_counts_once() -> None:
    line = "EngineDeadError\n"
    assert match(line * 1000) == match(line)
    assert len(known_lines(line * 1000)) == 1


def test_a_phrase_in_its_order_counts_more_than_its_words_alone() -> None:
    (in_order,) = (found for found in match("ring full") if found.book.cause == "ring-full-slow-reader")
    (apart,) = (found for found in match("full of it: the ring") if found.book.cause == "ring-full-slow-reader")
    assert in_order.score > apart.score > 0


def test_words_of_different_lines_make_no_phrase() -> None:
    assert "ring-full-slow-reader" in _causes("ring full")
    assert "ring-full-slow-reader" not in _causes("ring\nfull")


def test_every_match_says_why() -> None:
    assert all(found.because for found in match(f"{WAIT}\nrequests hang, nccl hang, bus error"))


@given(st.text())
def test_any_text_is_judged_and_always_the_same_way(text: str) -> None:
    first, second = match(text), match(text)
    assert first == second
    assert [found.score for found in first] == sorted((found.score for found in first), reverse=True)


@given(st.lists(st.sampled_from([k for book in playbooks().values() for k in book.keywords]), max_size=5))
def test_more_evidence_never_lowers_a_score(phrases: list[str]) -> None:
    text = "\n".join(phrases)
    before = {found.book.cause: found.score for found in match("bus error")}
    after = {found.book.cause: found.score for found in match(f"bus error\n{text}")}
    assert all(after[cause] >= score for cause, score in before.items() if cause in after)

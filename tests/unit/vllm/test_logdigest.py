"""The first error of a log, whatever stands before, after and between its lines."""

from __future__ import annotations

import pytest

from vllmdiag.model.logs import LogDigest
from vllmdiag.vllm.logscan import Scanner

CORE = "(EngineCore pid=7711) ERROR 07-02 03:11:20 [core.py:1201]"


def digest(text: str, **options: object) -> LogDigest:
    scanner = Scanner("vllm.log", **options)  # type: ignore[arg-type]
    scanner.feed(text.encode())
    return scanner.result().digest


def test_the_first_error_is_told_with_its_place_process_time_exception_and_frame() -> None:
    found = digest(f"""\
INFO 07-02 03:11:01 [api_server.py:100] vLLM API server version 0.11.2
{CORE} EngineCore failed to start.
{CORE} Traceback (most recent call last):
{CORE}   File "/v/vllm/v1/engine/core.py", line 133, in __init__
{CORE}     super().__init__(vllm_config)
{CORE} RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing ...
Traceback (most recent call last):
  File "/v/vllm/v1/engine/utils.py", line 759, in wait_for_engine_startup
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
""")
    first = found.first_error
    assert first is not None
    assert (first.kind, first.number, first.label, first.pid) == ("fork_cuda", 3, "EngineCore", 7711)
    assert (first.exception, first.frame, first.time) == ("RuntimeError", "core.py:133 in __init__", "07-02 03:11:20")
    assert [e.kind for e in found.echoes] == ["engine_init_failed"]
    assert (found.version, found.failed, found.served) == ("0.11.2", True, False)
    assert found.lines == 9


def test_echoes_alone_are_no_first_error() -> None:
    found = digest(f"""\
(EngineCore pid=9) INFO 07-02 03:06:20 [a.py:1] No available shared memory broadcast block found in 60 second
{CORE} EngineCore encountered a fatal error.
{CORE} Traceback (most recent call last):
{CORE}   File "/v/vllm/distributed/device_communicators/shm_broadcast.py", line 530, in acquire_read
{CORE}     raise TimeoutError
{CORE} TimeoutError
{CORE}
{CORE} The above exception was the direct cause of the following exception:
{CORE}
{CORE} Traceback (most recent call last):
{CORE}   File "/v/vllm/v1/executor/multiproc_executor.py", line 243, in collective_rpc
{CORE} TimeoutError: RPC call to sample_tokens timed out.
(APIServer pid=1) ERROR 07-02 03:11:20 [async_llm.py:480] AsyncLLM output_handler failed.
(APIServer pid=1) ERROR 07-02 03:11:20 [async_llm.py:480] Traceback (most recent call last):
(APIServer pid=1) ERROR 07-02 03:11:20 [async_llm.py:480]   File "/v/core_client.py", line 8, in get_output_async
(APIServer pid=1) ERROR 07-02 03:11:20 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore ...
resource_tracker: There appear to be 4 leaked shared_memory objects to clean up at shutdown
""")
    assert found.first_error is None
    assert {e.kind for e in found.echoes} >= {"long_wait", "rpc_timeout", "engine_dead", "leaked_shm"}


def test_tracebacks_of_two_workers_line_by_line_are_told_apart() -> None:
    def worker(n: int, text: str) -> str:
        return f"(Worker_TP{n} pid=30{n}) ERROR 07-02 03:11:2{n} [multiproc_executor.py:671] {text}"

    lines = [
        ("WorkerProc hit an exception.", "WorkerProc hit an exception."),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ('  File "/v/a.py", line 1, in first', '  File "/v/b.py", line 2, in second'),
        ("    code()", "    code()"),
        ("ValueError: of the first", "KeyError: 'of the second'"),
    ]
    found = digest("\n".join(worker(n, pair[n]) for pair in lines for n in (0, 1)))
    first = found.first_error
    assert first is not None
    assert (first.label, first.exception, first.frame) == ("Worker_TP0", "ValueError", "a.py:1 in first")
    assert [(e.label, e.exception, e.frame) for e in found.other_errors] == [
        ("Worker_TP1", "KeyError", "b.py:2 in second")
    ]


def test_a_request_that_fails_in_the_server_is_not_the_first_error_of_the_engine() -> None:
    found = digest(f"""\
(APIServer pid=1) ERROR 07-02 03:00:00 [serving_chat.py:233] Error in preprocessing prompt inputs
(APIServer pid=1) ERROR 07-02 03:00:00 [serving_chat.py:233] Traceback (most recent call last):
(APIServer pid=1) ERROR 07-02 03:00:00 [serving_chat.py:233]   File "/v/vllm/entrypoints/x.py", line 4, in f
(APIServer pid=1) ERROR 07-02 03:00:00 [serving_chat.py:233] ValueError: a request that is too long
{CORE} Traceback (most recent call last):
{CORE}   File "/v/vllm/v1/engine/core.py", line 9, in step
{CORE} AssertionError
{CORE} EngineCore encountered a fatal error.
""")
    assert found.first_error is not None
    assert (found.first_error.label, found.first_error.exception) == ("EngineCore", "AssertionError")


BANNER = "INFO 07-02 03:{minute}:00 [api_server.py:100] vLLM API server version 0.9.1\n"
IN_USE = "(EngineCore pid=2) ERROR 07-02 03:{minute}:09 [core.py:1] OSError: [Errno 98] Address already in use\n"
DEAD = "ERROR 07-02 03:{minute}:10 [core.py:1] EngineCore failed to start.\n"
STARTED = "INFO:     Application startup complete.\n"


def test_the_failure_that_began_a_row_of_restarts_is_the_first_error() -> None:
    text = BANNER.format(minute="00") + STARTED
    text += "ERROR 07-02 03:05:00 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, ...\n"
    for minute in ("06", "07", "08"):
        text += BANNER.format(minute=minute) + IN_USE.format(minute=minute) + DEAD.format(minute=minute)
    found = digest(text)
    assert found.generations == 4
    assert found.first_error is not None
    assert (found.first_error.kind, found.first_error.generation) == ("worker_died", 1)


def test_a_failure_before_a_start_that_served_is_the_past() -> None:
    text = BANNER.format(minute="00") + IN_USE.format(minute="00") + DEAD.format(minute="00")
    found = digest(text + BANNER.format(minute="10") + STARTED)
    assert (found.generations, found.first_error, found.served, found.failed) == (2, None, True, False)


def test_a_warning_about_a_limit_is_no_fault() -> None:
    found = digest(
        "WARNING 07-02 03:00:00 [system_utils.py:1] Found ulimit of 4096 and failed to automatically increase with"
        " error x. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.\n"
    )
    assert found.first_error is None


def test_the_ring_that_its_writer_announces_is_kept_with_its_geometry() -> None:
    found = digest(
        "(EngineCore pid=5) INFO 11-30 23:03:33 [shm_broadcast.py:589] vLLM message queue communication handle:"
        " Handle(local_reader_ranks=[0, 1], buffer_handle=(2, 16777216, 10, 'psm_34bbcbbf'),"
        " local_subscribe_addr='ipc:///tmp/x')\n"
    )
    (ring,) = found.rings
    assert (ring.name, ring.readers, ring.chunk_bytes, ring.chunks, ring.pid) == ("psm_34bbcbbf", 2, 16 << 20, 10, 5)


def test_steps_of_a_start_are_kept_the_last_of_each_kind() -> None:
    wait = (
        "(APIServer pid=1) DEBUG 07-02 03:00:{s} [utils.py:1262] Waiting for 1 local, 0 remote core engine proc(s) to"
        " start.\n"
    )
    found = digest("".join(wait.format(s=s) for s in (10, 20, 30)))
    (phase,) = found.phases
    assert (phase.kind, phase.count, phase.time) == ("waiting_engines", 3, "07-02 03:00:30")


def test_requests_are_counted_by_age_and_their_words_are_not_kept() -> None:
    def line(second: int, words: str) -> str:
        return f"INFO 07-02 03:{second // 60:02d}:{second % 60:02d} [logger.py:43] {words}\n"

    asked = "Received request cmpl-{n}: prompt: 'my secret', params: SamplingParams(n=1)"
    text = line(0, asked.format(n="a1")) + line(0, "Added request cmpl-a1.") + line(60, "Aborted request cmpl-a1.")
    text += line(62, asked.format(n="b2"))
    scanner = Scanner("vllm.log")
    scanner.feed(text.encode())
    found = scanner.result()
    assert found.digest.arrived == 2
    assert [(a.age_s, a.again_s) for a in found.digest.aborts] == [(60.0, 2.0)]
    assert "secret" not in str(found)


@pytest.mark.parametrize("messages", [True, False])
def test_words_of_unknown_errors_are_kept_only_where_that_is_asked_for(messages: bool) -> None:
    lines = ["Traceback (most recent call last):", '  File "/v/x.py", line 1, in f', "ValueError: my secret"]
    text = "".join(f"{CORE} {line}\n" for line in lines)
    found = digest(text, messages=messages)
    assert found.first_error is not None
    assert (found.first_error.exception, found.first_error.frame) == ("ValueError", "x.py:1 in f")
    assert ("secret" in str(found)) == messages

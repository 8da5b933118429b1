"""A log is found by its lines, whatever is wrapped around it, and its first error is told with its place."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from vllmdiag.bundle.triage import triage
from vllmdiag.model.snapshot import Snapshot

LOG = [
    "(APIServer pid=1) INFO 07-02 03:11:01 [api_server.py:100] vLLM API server version 0.11.2",
    "(EngineCore_DP0 pid=7) ERROR 07-02 03:11:20 [core.py:708] EngineCore failed to start.",
    "(EngineCore_DP0 pid=7) ERROR 07-02 03:11:20 [core.py:708] Traceback (most recent call last):",
    '(EngineCore_DP0 pid=7) ERROR 07-02 03:11:20 [core.py:708]   File "/v/core.py", line 133, in __init__',
    "(EngineCore_DP0 pid=7) ERROR 07-02 03:11:20 [core.py:708]     self.x = y",
    "(EngineCore_DP0 pid=7) ERROR 07-02 03:11:20 [core.py:708] OSError: [Errno 98] Address already in use",
    "(APIServer pid=1) Traceback (most recent call last):",
    '(APIServer pid=1)   File "/v/vllm/v1/engine/utils.py", line 759, in wait_for_engine_startup',
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
]


def read(text: str) -> Snapshot:
    return triage(["-"], io.BytesIO(text.encode())).snapshot()


def _json(lines: list[str]) -> str:
    return "".join(
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-07-02T01:11:20Z"}) + "\n" for line in lines
    )


WRAPS: dict[str, Callable[[list[str]], str]] = {
    "as it is": "\n".join,
    "line ends of Windows": "\r\n".join,
    "colours": lambda lines: "\n".join(f"\x1b[0;36m{line.replace(')', ')' + chr(27) + '[0;0m', 1)}" for line in lines),
    "kubectl with timestamps": lambda lines: "\n".join(f"2026-07-02T03:11:20.123456789Z {line}" for line in lines),
    "containerd": lambda lines: "\n".join(f"2026-07-02T03:11:20.123456789Z stderr F {line}" for line in lines),
    "docker compose": lambda lines: "\n".join(f"vllm-1  | {line}" for line in lines),
    "journald": lambda lines: "\n".join(f"Jul 02 03:11:20 gpu-7 vllm[1]: {line}" for line in lines),
    "records of docker": _json,
    "a quoted reply": lambda lines: "\n".join(f"> {line}" for line in lines),
    "a report": lambda lines: "It fails:\n\n```text\n" + "\n".join(lines) + "\n```\nAny idea?\n",
    "a report without a fence": lambda lines: "It fails:\n\n" + "\n".join(lines) + "\n\nAny idea?\n",
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_a_log_is_read_through_whatever_is_around_it(wrap: Callable[[list[str]], str]) -> None:
    seen = read(wrap(LOG))
    (digest,) = seen.logs
    first = digest.first_error
    assert first is not None
    assert (first.kind, first.label, first.pid) == ("address_in_use", "EngineCore_DP0", 7)
    assert (first.exception, first.frame) == ("OSError", "core.py:133 in __init__")
    assert (digest.version, digest.failed) == ("0.11.2", True)
    assert [e.kind for e in digest.echoes] == ["engine_init_failed"]


@pytest.mark.parametrize(("before", "line"), [("", 3), ("It fails:\n\n```\n", 6)])
def test_the_line_is_that_of_the_file(before: str, line: int) -> None:
    (digest,) = read(before + "\n".join(LOG)).logs
    assert digest.first_error is not None
    assert digest.first_error.number == line


def test_a_stack_in_the_middle_of_a_log_is_read_as_a_stack_and_the_log_goes_on() -> None:
    dump = 'Process 7: VLLM::EngineCore\nPython v3.12.3 (/x)\n\nThread 7 (idle): "MainThread"\n    wait (queue.py:9)\n'
    seen = read("\n".join(LOG[:2]) + "\n" + dump + "\n" + "\n".join(LOG[2:]))
    assert [p.pid for p in seen.processes] == [7]
    assert [d.first_error.kind for d in seen.logs if d.first_error] == ["engine_failed_start", "address_in_use"]


def test_requests_of_a_user_are_measured_and_not_kept() -> None:
    text = "INFO 07-02 03:00:00 [logger.py:43] Received request cmpl-1: prompt: 'my secret', params: x\n"
    seen = read(text + "INFO 07-02 03:10:00 [async_llm.py:1] Aborted request cmpl-1.\n")
    assert [a.age_s for d in seen.logs for a in d.aborts] == [600.0]
    assert "secret" not in str(seen)

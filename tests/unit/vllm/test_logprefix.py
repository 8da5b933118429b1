from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.logprefix import Said, begins_as_log, said

NOON = (6 * 31 + 4) * 86400.0 + 12 * 3600


def one(line: str) -> Said:
    (part,) = said(line)
    return part


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "INFO 06-04 12:00:00 api_server.py:585] words",
            {"level": "INFO", "source": "api_server.py:585", "at": NOON},
        ),
        (
            "(EngineCore_DP0 pid=123) ERROR 06-04 12:00:00 [v1/engine/core.py:710] words",
            {"level": "ERROR", "label": "EngineCore_DP0", "pid": 123, "source": "core.py:710", "at": NOON},
        ),
        (
            "(VllmWorker rank=1 pid=77) INFO 06-04 12:00:00 [gpu_worker.py:1] words",
            {"label": "VllmWorker rank=1", "pid": 77, "rank": 1},
        ),
        (
            "(EngineCore_DP0 pid=5) (RayWorkerWrapper pid=7, ip=10.0.0.2) INFO 06-04 12:00:00 [a.py:1] words",
            {"label": "RayWorkerWrapper", "pid": 7, "node": "10.0.0.2"},
        ),
        (
            "[node-b] (Worker_TP8 pid=510) ERROR 06-04 12:00:00 [a.py:1] words",
            {"node": "node-b", "label": "Worker_TP8", "pid": 510, "at": NOON},
        ),
        ("(EngineCore pid=60) INFO [shm_broadcast.py:705] words", {"pid": 60, "source": "shm_broadcast.py:705"}),
        ("INFO:     words", {"level": "INFO"}),
        (
            "2026-06-04T11:59:59.123456789Z stderr F (Worker_TP1 pid=3) INFO 06-04 12:00:00 [a.py:1] words",
            {"label": "Worker_TP1", "at": NOON, "outer_at": NOON - 0.876543211},
        ),
        (
            "Jun 04 12:00:00 gpu-7 vllm[99]: (Worker_TP1 pid=3) ERROR 06-04 12:00:00 [a.py:1] words",
            {"node": "gpu-7", "label": "Worker_TP1", "pid": 3, "outer_at": NOON},
        ),
        ("[pod/vllm-0/engine] (EngineCore pid=9) INFO 06-04 12:00:00 [a.py:1] words", {"node": "vllm-0", "pid": 9}),
        ("engine-1  | (EngineCore pid=9) INFO 06-04 12:00:00 [a.py:1] words", {"node": "engine-1", "pid": 9}),
        ("[rank3]:[E604 12:00:00.5 ProcessGroupNCCL.cpp:616] words", {"rank": 3, "level": "ERROR", "at": NOON}),
        ("[1,2]<stderr>:ERROR 06-04 12:00:00 [a.py:1] words", {"rank": 2, "level": "ERROR"}),
        ("E0604 12:00:00.101 2474524 thd.cc:157] words", {"level": "ERROR", "source": "thd.cc:157", "at": NOON}),
        ("node-a:100:104 [1] NCCL INFO words", {"node": "node-a", "pid": 100, "rank": 1}),
        ("\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 06-04 12:00:00 [a.py:1] words", {"label": "APIServer", "pid": 1}),
    ],
)  # fmt: skip
def test_a_prefix_tells_who_says_it_and_when(line: str, expected: dict[str, object]) -> None:
    part = one(line)
    assert part.text.endswith("words")
    for name, value in expected.items():
        got = getattr(part, name)
        assert got == (pytest.approx(value) if isinstance(value, float) else value), name
    assert begins_as_log(line)


def test_a_record_of_docker_holds_a_line_of_vllm() -> None:
    line = (
        '{"log":"(EngineCore pid=5) ERROR 06-04 12:00:00 [core.py:1] words\\n","stream":"stderr",'
        '"time":"2026-06-04T10:00:00.5Z"}'
    )
    part = one(line)
    assert (part.label, part.pid, part.text, part.level) == ("EngineCore", 5, "words", "ERROR")


def test_a_record_of_a_json_logger_holds_a_whole_traceback() -> None:
    line = (
        '{"timestamp":"2026-06-04T12:00:00Z","levelname":"ERROR","process":8,"message":"failed",'
        '"exc_info":"Traceback (most recent call last):\\n  File \\"a.py\\", line 1, in f\\nValueError: no"}'
    )
    parts = list(said(line))
    assert [p.text for p in parts] == [
        "failed",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "ValueError: no",
    ]
    assert {(p.level, p.pid, p.at) for p in parts} == {("ERROR", 8, NOON)}


@pytest.mark.parametrize("line", ["", "words of a user", '  File "a.py", line 3', "Process 12: VLLM::EngineCore", "{}"])
def test_what_is_no_log_line_is_not_taken_for_one(line: str) -> None:
    assert not begins_as_log(line)
    assert one(line).text == line


@given(st.text())
def test_any_line_is_taken_apart_and_loses_no_word(line: str) -> None:
    parts = list(said(line))
    begins_as_log(line)
    assert all(part.text in line or line.startswith("{") or "\x1b" in line for part in parts)


def test_a_word_in_brackets_is_no_machine_unless_a_process_follows() -> None:
    assert one("[shutdown] Executor: words").text == "[shutdown] Executor: words"

"""Logs of any content and cut anywhere are read, and a cheap search never misses what the exact one would find."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmdiag.vllm.logdigest import LogReader
from vllmdiag.vllm.loglines import LogLineKind, find, kinds
from vllmdiag.vllm.logscan import Scanner

LINES = st.sampled_from(
    [
        "(EngineCore pid=1) INFO 07-02 03:11:20 [a.py:1] words",
        "(EngineCore pid=1) ERROR 07-02 03:11:20 [core.py:2] Traceback (most recent call last):",
        '(EngineCore pid=1) ERROR 07-02 03:11:20 [core.py:2]   File "/v/core.py", line 133, in step',
        "(EngineCore pid=1) ERROR 07-02 03:11:20 [core.py:2]     code()",
        "(EngineCore pid=1) ERROR 07-02 03:11:20 [core.py:2] RuntimeError: CUDA error: unknown",
        "(Worker_TP1 pid=2) ERROR 07-02 03:11:21 [x.py:3] WorkerProc hit an exception.",
        "Traceback (most recent call last):",
        '  File "/v/a.py", line 1, in f',
        "    code()",
        "KeyError: 'x'",
        "",
        "INFO:     Application startup complete.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "INFO 07-02 03:12:00 [api_server.py:9] vLLM API server version 0.9.1",
    ]
)


@given(st.lists(LINES, max_size=40), st.integers(1, 50))
def test_blocks_cut_anywhere_give_the_digest_of_the_lines_one_by_one(lines: list[str], size: int) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    scanner = Scanner("x")
    for at in range(0, len(data), size):
        scanner.feed(data[at : at + size])
    reader = LogReader("x")
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    assert scanner.result().digest == reader.digest(lines=len(lines), size=len(data))


@given(st.binary(max_size=2000))
def test_any_bytes_are_read(data: bytes) -> None:
    scanner = Scanner("x")
    scanner.feed(data)
    found = scanner.result()
    assert found.digest.bytes == len(data)


@pytest.mark.parametrize("kind", kinds(), ids=lambda k: k.id)
def test_every_line_of_a_kind_holds_one_of_its_needles(kind: LogLineKind) -> None:
    @settings(max_examples=10)  # there are many kinds, and text made from a pattern is slow to come
    @given(st.from_regex(re.compile(kind.regex)))
    def holds(text: str) -> None:
        assert any(needle in text for needle in kind.needles)
        assert find(text) is not None

    holds()

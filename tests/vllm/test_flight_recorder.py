"""Flight recorder dumps that the torch of this vLLM makes of real processes over gloo: the odd rank is named."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.setup_vllm import Installation
from tests.vllm.waiting import wait_until
from vllmdiag.diagnosis.flight import disagreements, say
from vllmdiag.model.process import Process
from vllmdiag.sources.flight_recorder import records

SCRIPT = Path(__file__).parent / "inside" / "gloo_ranks.py"
ODD, RANKS = 1, 3


@pytest.fixture
def dumps(request: pytest.FixtureRequest, installation: Installation, tmp_path: Path) -> Iterator[Path]:
    """Where three ranks have left their dumps."""
    mode: str = request.param
    ranks = [
        subprocess.Popen(
            [installation.python, SCRIPT, mode, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    try:
        wait_until("three dumps", lambda: len(list(tmp_path.glob("trace_*"))) == RANKS, deadline_s=180)
        yield tmp_path
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("dumps", "words"),
    [
        ("lag", "rank 1 has not entered it"),
        ("kind", "rank 1 entered all_gather of 16 Float"),
        ("size", "rank 1 entered all_reduce of 32 Float"),
    ],
    indirect=["dumps"],
)
def test_the_rank_that_does_not_fit_is_named(dumps: Path, words: str) -> None:
    me = Process(pid=os.getpid(), uid=os.getuid(), age_s=3600.0)
    found, holes = records([me], [{"TORCH_FR_DUMP_TEMP_FILE": str(dumps / "trace_")}])
    assert ([record.rank for record in found], holes) == ([0, 1, 2], [])
    (one,) = disagreements(found)
    assert (one.suspects, one.seq) == ((ODD,), 4)
    assert one.wanted == "all_reduce of 16 Float"
    assert say(one).endswith(f": {words}")

"""The poller keeps every change once, in order, whatever the flags do."""

from __future__ import annotations

import os
import tempfile
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.shm import Segment
from vllmdiag.sources import rings

MIB = 1 << 20


@given(st.lists(st.binary(min_size=4, max_size=4), min_size=1, max_size=60), st.integers(2, 8))
def test_the_states_are_the_run_length_code_of_what_was_polled(flags: list[bytes], cap: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.ftruncate(file.fileno(), 2 * (MIB + 2))
        status = os.fstat(file.fileno())
        segment = Segment(path=file.name, dev=status.st_dev, ino=status.st_ino, size=status.st_size)
        track = rings._Track(segment, "/", max_states=cap)
        for t, now in enumerate(flags):
            os.pwrite(file.fileno(), now, 2 * MIB)
            track.poll(float(t))
        track.close()
        result = track.result(1.0)
    runs = [(float(next(group)[0]), tail) for tail, group in groupby(enumerate(flags), key=lambda pair: pair[1])]
    kept = runs if len(runs) <= cap else [*runs[: cap - 1], runs[-1]]
    assert [(state.t, state.tail) for state in result.states] == kept
    assert result.states_dropped == len(runs) - len(kept)
    assert result.polls == len(flags)

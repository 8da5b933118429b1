"""Locks of caches: held by real processes, left behind by killed ones, and lines of /proc/locks of any form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.model.process import Process
from vllmdiag.model.startup import FileLock
from vllmdiag.sources.locks import Row, file_locks, parse_locks

HOLD = (
    "import fcntl,sys; f=open({path!r},'w'); fcntl.{call}(f,fcntl.LOCK_EX); print('held',flush=True); sys.stdin.read()"
)
WAIT = "import fcntl,sys; f=open({path!r},'w'); print('waits',flush=True); fcntl.flock(f,fcntl.LOCK_EX)"
BATON = "import os,sys; os.open({path!r},os.O_CREAT|os.O_EXCL); print('built',flush=True); sys.stdin.read()"


def test_the_holder_of_a_lock_is_named_with_its_path_and_state(children: Any, tmp_path: Path) -> None:
    for call in ("flock", "lockf"):
        path = tmp_path / f"{call}.lock"
        pid, _ = children.python(HOLD.format(path=str(path), call=call))
        (lock,) = [lock for lock in file_locks([]) if lock.path == str(path)]
        assert (lock.holder, lock.kind) == (pid, {"flock": "FLOCK", "lockf": "POSIX"}[call])
        assert lock.holder_state in "SRD"
        assert lock.holder_comm.startswith("python")
        assert lock.age_s is not None
        assert not lock.stale


def test_who_sleeps_for_a_lock_is_told_from_who_holds_it(children: Any, eventually: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    holder, _ = children.python(HOLD.format(path=str(path), call="flock"))
    waiter, _ = children.python(WAIT.format(path=str(path)))
    lock = eventually(lambda: next((k for k in file_locks([]) if k.path == str(path) and k.waiters), None))
    assert (lock.holder, lock.waiters) == (holder, (waiter,))


def test_a_file_that_is_not_named_like_a_lock_is_none(children: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.db"
    children.python(HOLD.format(path=str(path), call="flock"))
    assert str(path) not in {lock.path for lock in file_locks([])}


def _batons(place: Path) -> list[FileLock]:
    builder = Process(pid=os.getpid(), environ={"TORCH_EXTENSIONS_DIR": str(place)})
    return [lock for lock in file_locks([builder]) if lock.kind == "baton"]


def test_a_baton_is_held_as_long_as_somebody_has_it_open_and_stale_afterwards(children: Any, tmp_path: Path) -> None:
    path = tmp_path / "py311_cpu" / "ext" / "lock"
    path.parent.mkdir(parents=True)
    pid, _ = children.python(BATON.format(path=str(path)))
    (held,) = _batons(tmp_path)
    assert (held.kind, held.holder, held.path, held.stale) == ("baton", pid, str(path), False)
    children.end(pid)
    (left,) = _batons(tmp_path)
    assert (left.holder, left.stale) == (None, True)


def test_a_place_that_does_not_exist_holds_no_baton(tmp_path: Path) -> None:
    assert _batons(tmp_path / "none") == []


def test_lines_of_the_kernel_are_read() -> None:
    text = (
        "1: FLOCK  ADVISORY  WRITE 6154 fe:00:3014845 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 6160 fe:00:3014845 0 EOF\n"
        "2: OFDLCK ADVISORY  READ  -1 00:06:12 0 EOF\n"
        "3: LEASE  ACTIVE    READ  77 00:06:13 0 EOF\n"
    )
    assert parse_locks(text) == [
        Row("FLOCK", 6154, 3014845, False),
        Row("FLOCK", 6160, 3014845, True),
        Row("OFDLCK", -1, 12, False),
        Row("LEASE", 77, 13, False),
    ]


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert all(isinstance(row.pid, int) for row in parse_locks(text))

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllmdiag.sources import deadline


def echo(item: str) -> bytes:
    if item == "block":
        time.sleep(3600)
    if item == "die":
        os._exit(1)
    if item == "refuse":
        raise PermissionError(errno.EACCES, "no")
    return item.encode()


def test_answers_and_refusals_come_back_in_order() -> None:
    answers = deadline.each(echo, ["a", "refuse", "", "b"])
    assert answers[0] == b"a"
    assert isinstance(answers[1], PermissionError)
    assert answers[1].errno == errno.EACCES
    assert answers[2:] == [b"", b"b"]


def test_a_call_that_never_returns_is_killed_and_the_others_are_answered() -> None:
    before = psutil.Process().children()
    answers = deadline.each(echo, ["a", "block", "b"], timeout_s=0.2)
    assert answers[0] == b"a"
    assert isinstance(answers[1], TimeoutError)
    assert answers[2] == b"b"
    assert psutil.Process().children() == before


def test_late_calls_have_one_budget_and_what_is_left_is_not_tried() -> None:
    answers = deadline.each(echo, ["block", "block", "a"], timeout_s=0.1, total_s=0.2)
    assert [type(answer) for answer in answers] == [TimeoutError] * 3
    assert "not tried" in str(answers[2])


def test_where_one_call_is_late_the_rest_of_its_group_is_not_tried_but_other_groups_are() -> None:
    items = [("x", "a"), ("x", "block"), ("x", "block"), ("x", "b"), ("y", "c")]
    answers = deadline.each(lambda item: echo(item[1]), items, timeout_s=0.2, total_s=0.3, group=lambda item: item[0])
    assert answers[0] == b"a"
    assert [type(answer) for answer in answers[1:4]] == [TimeoutError] * 3
    assert answers[4] == b"c"


def test_a_child_that_dies_costs_only_the_item_it_stood_at() -> None:
    answers = deadline.each(echo, ["a", "die", "b"])
    assert isinstance(answers[1], ChildProcessError)
    assert (answers[0], answers[2]) == (b"a", b"b")


def test_one_call_raises_what_the_function_raised() -> None:
    assert deadline.call(lambda: b"x" * 5_000_000, timeout_s=60) == b"x" * 5_000_000
    with pytest.raises(PermissionError):
        deadline.call(lambda: echo("refuse"))
    with pytest.raises(TimeoutError):
        deadline.call(lambda: echo("block"), timeout_s=0.1)


def test_no_descriptor_is_left_open() -> None:
    before = os.listdir("/proc/self/fd")
    deadline.each(echo, ["a", "block", "die", "refuse"], timeout_s=0.1)
    assert os.listdir("/proc/self/fd") == before


def test_a_program_that_inherited_ignored_child_signals_reads_as_well() -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        answers = deadline.each(echo, ["a", "block", "b"], timeout_s=0.1)
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert (answers[0], type(answers[1]), answers[2]) == (b"a", TimeoutError, b"b")


def test_a_child_whose_parent_has_gone_does_not_stay_behind() -> None:
    program = (
        "import os, threading\n"
        "from vllmdiag.sources import deadline\n"
        "def read(_): print(os.getpid(), flush=True); return bytes(1 << 24)\n"
        "threading.Thread(target=deadline.each, args=(read, [1, 2]), daemon=True).start()\n"
        "deadline._receive = lambda *_: threading.Event().wait()\n"
        "input()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.communicate("\n")
    end = time.monotonic() + 30
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end, "it writes to nobody for ever"
        time.sleep(0.05)

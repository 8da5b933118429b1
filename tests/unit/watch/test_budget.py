from __future__ import annotations

import os
import time

from vllmdiag.watch.budget import Budget, cpu_s


def test_what_was_saved_up_is_spent_and_then_looks_wait() -> None:
    budget = Budget(share=0.0)
    assert budget.allows()
    budget.spend(100.0)
    assert not budget.allows()


def test_time_fills_the_budget_again() -> None:
    budget = Budget(share=1000.0)
    budget.spend(2.0)
    end = time.monotonic() + 30
    while not budget.allows():
        assert time.monotonic() < end


def test_the_cpu_of_children_counts() -> None:
    before = cpu_s()
    pid = os.fork()
    if pid == 0:
        while sum(os.times()[:2]) < 0.1:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_s() - before >= 0.05

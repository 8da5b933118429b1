"""What every test may use: the `needs` marker. A test whose helper is missing is left out, and the summary says so."""

from __future__ import annotations

import os
import shutil
import socket
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: no test here is about speed. A gate gives the same answer twice; elsewhere each
# run tries new examples.
settings.register_profile(
    "vllmdiag",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("VLLMDIAG_TEST_ALL") == "1",
)
settings.load_profile("vllmdiag")

_LEFT_OUT: pytest.StashKey[dict[str, list[str]]] = pytest.StashKey()


def _absent(helper: str) -> str | None:
    """Why a helper cannot be used here, or None when it can: ``root``, ``ipv6`` or the name of a program."""
    if helper == "root":
        return None if os.geteuid() == 0 else "needs root"
    if helper == "ipv6":
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            return "needs IPv6 on loopback"
        return None
    return None if shutil.which(helper) else f"needs {helper}, which is not installed"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here; with VLLMDIAG_TEST_ALL=1 (as in CI) nothing is left out and it fails instead."""
    left_out: dict[str, list[str]] = defaultdict(list)
    config.stash[_LEFT_OUT] = left_out
    if os.environ.get("VLLMDIAG_TEST_ALL") == "1":
        return
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        helpers = [helper for mark in item.iter_markers("needs") for helper in mark.args]
        reasons = [reason for helper in helpers if (reason := _absent(helper))]
        (dropped if reasons else kept).append(item)
        for reason in reasons[:1]:
            left_out[reason].append(item.nodeid)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests did not run, and why."""
    for reason, tests in sorted(config.stash.get(_LEFT_OUT, {}).items()):
        terminalreporter.section(f"left out: {len(tests)} ({reason})", sep="-", yellow=True)
        for test in tests:
            terminalreporter.line(test)

"""Experiments: each makes a property of processes, queues or sockets happen, and measures it. Nothing here is asserted.

Three are those that texts on vLLM's processes tell of (isolation, identity, oob), four more explain what `diagnose`
looks at (backpressure, slow-joiner, hwm, cow).
"""

from __future__ import annotations

import importlib

from .report import Report

EXPERIMENTS = {
    "isolation": "what a forked child writes is not seen by its parent, unless the page is shared",
    "identity": "a ROUTER finds its peer by identity, and says nothing where there is none",
    "oob": "a large buffer travels beside its pickle: copies and bytes, in band and out of band",
    "backpressure": "a writer goes on for as many slots as the ring has, then at the pace of the slowest reader",
    "slow-joiner": "what a publisher sends before the subscription has come is lost",
    "hwm": "at the high-water mark PUSH waits and PUB drops; with none, memory grows",
    "cow": "after a fork pages are shared until somebody writes, and reading a Python object writes",
}
"""Name -> what it shows."""


def measure(name: str) -> Report:
    """Carry one out. Raises KeyError for a name that is not in `EXPERIMENTS`."""
    if name not in EXPERIMENTS:
        raise KeyError(name)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    report: Report = module.measure()
    return report

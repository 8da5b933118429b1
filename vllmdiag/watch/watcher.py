"""The loop of `watch`: find a server, watch it to its end, wait for the one that takes its place."""

from __future__ import annotations

import threading

from vllmdiag.model.errors import TargetError, VllmdiagError
from vllmdiag.model.watch import Frame
from vllmdiag.sources.window import now

from .evidence import Commands, Evidence
from .finding import Wanted
from .generation import Generation, Plan
from .look import look
from .outlet import Outlet

_FIRST_WINDOW_S = 1.0
_SEARCH_S = 1.0


def watch(
    plan: Plan, wanted: Wanted, evidence: Evidence, commands: Commands, outlet: Outlet, stop: threading.Event
) -> None:
    """Watch one server after the other until `stop` is set.

    Args:
        plan: how.
        wanted: which server.
        evidence: where bundles go.
        commands: what is run when one was captured.
        outlet: is told everything.
        stop: ends the loop within a moment.

    Raises:
        TargetError: at the beginning, a pid that is no server's, or several servers and none named.
    """
    try:
        while (pid := _await_server(wanted, outlet, stop)) is not None:
            try:
                first = look(pid, _FIRST_WINDOW_S)
            except VllmdiagError:  # it has ended already
                continue
            Generation(plan, first, evidence, commands, outlet, wanted.replaced, stop).run()
        outlet.event("stopped", "watch ends")
    finally:
        commands.close()
        outlet.close()


def _await_server(wanted: Wanted, outlet: Outlet, stop: threading.Event) -> int | None:
    """A pid of the server; None when it is time to stop."""
    told = False
    while not stop.is_set():
        try:
            instance = wanted.find()
        except TargetError:
            if outlet.generation == 0:
                raise
            instance = None
        if instance is not None:
            outlet.generation += 1
            wanted.found(instance)
            return instance.roots[0]
        if not told:
            outlet.event("waiting", "no vLLM server is here; waiting for one")
            told = True
        outlet.picture(Frame(title="waiting for a vLLM server", at=now()))
        stop.wait(_SEARCH_S)
    return None

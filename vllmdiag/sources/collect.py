"""From the wish to look at an instance to the Snapshot of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllmdiag import __version__
from vllmdiag.model.shm import Segment
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceLine
from vllmdiag.vllm.layouts import classify_file

from . import observe, proc, shm, target, viewer
from .window import Progress, Window, now

_START_SHARE = 0.25
"""The part of the window that the start of the program may take."""


def list_instances(root: str = "/") -> tuple[InstanceLine, ...]:
    """The instances of this host, one line each."""
    processes, instances = target.running(root)
    return target.lines(instances, processes)


def collect(
    pid: int | None = None,
    port: int | None = None,
    window_s: float = 3.0,
    depth: str = "diagnose",
    progress: Progress = lambda _: None,
    root: str = "/",
    *,
    asked: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Snapshot:
    """Watch one instance for `window_s` seconds; what is late then is waited for, for at most 2 s.

    Args:
        pid: any process of the instance; None for the only one.
        port: its HTTP port, instead of a pid.
        window_s: seconds from the first to the last sample.
        depth: the verb; ``ps``, ``shm`` and ``endpoints`` leave out what they do not show.
        progress: told in a few words what is going on.
        root: where /proc is looked up.
        asked: when the user asked, on `time.monotonic`. What has passed since then counts as a part of the window, up
            to a quarter of it; the snapshot says how long the window really was.
        meanwhile: called once, early in the window when there is nothing to do but to wait.

    Raises:
        TargetError: no such instance, or several and none named.
    """
    began = time.monotonic()
    window_s -= min(window_s * _START_SHARE, began - (asked or began))
    progress("looking for vLLM")
    processes, instances = target.running(root)
    instance = target.choose(instances, processes, pid, port, root)
    if instance is None:
        seen = collect_host(root)
        if not any(_left_behind(s) for s in seen.segments):
            raise target.nothing_found(root)
        return seen
    others = {p for i in instances if i is not instance for p in i.pids}
    window = Window(instance, processes, others, began, window_s, depth, progress, root)
    return window.run(meanwhile)


def collect_host(root: str = "/") -> Snapshot:
    """The shared memory of this machine without an instance: what dead servers left behind."""
    looker = viewer.viewer(root)
    here = [observe.observe(p, root) for p in proc.scan(root) if p.pid == looker.pid]
    return Snapshot(
        tool=__version__,
        observed_at=now(),
        viewer=looker,
        node=viewer.node(root),
        segments=tuple(shm.segments(here, root)),
        shm_mounts=tuple(shm.mounts(here, root)),
    )


def _left_behind(segment: Segment) -> bool:
    """A ring that nobody holds: only a server that did not end cleanly leaves one."""
    return not segment.holders and classify_file(segment.name, segment.size).ring

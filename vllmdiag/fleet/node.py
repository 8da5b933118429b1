"""The far end: looks at every instance of this node at once and writes the answer, for `fleet diagnose` to read."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from vllmdiag import __version__
from vllmdiag.model.errors import VllmdiagError
from vllmdiag.sources.collect import collect
from vllmdiag.sources.target import living, running

from .wire import End, Hello, Seen, encode

_AT_ONCE = 8
_GRACE_S = 5


def answer(window_s: float, deadline_s: int, write: Callable[[bytes], object]) -> None:
    """Write greeting, snapshots and end.

    Args:
        window_s: how long each instance is watched.
        deadline_s: a little after this the process ends itself: whoever asked has gone by then.
        write: takes bytes and passes them on at once.
    """
    _end_at(deadline_s)
    processes, instances = running()
    pids = [instance.roots[0] for instance in living(instances, processes)]
    write(encode(Hello(tool=__version__, clock=time.time(), instances=len(pids))))
    for line in _look(pids, window_s, deadline_s):
        write(line)
    write(encode(End()))


def _end_at(deadline_s: int) -> None:
    """Let the kernel end this process when nobody listens any more, whatever it hangs in."""
    signal.alarm(deadline_s + _GRACE_S)


def _look(pids: list[int], window_s: float, deadline_s: int) -> Iterator[bytes]:
    """The lines of all instances, watched side by side, each as it is ready: one that hangs holds up no other."""
    if len(pids) < 2:
        yield from (_seen(pid, window_s) for pid in pids)
        return
    context = multiprocessing.get_context("fork")  # a program in one file has no module that a fresh child could import
    at_once = min(_AT_ONCE, len(pids))
    with ProcessPoolExecutor(at_once, mp_context=context, initializer=_end_at, initargs=(deadline_s,)) as pool:
        for done in as_completed([pool.submit(_seen, pid, window_s) for pid in pids]):
            yield done.result()


def _seen(pid: int, window_s: float) -> bytes:
    try:
        return encode(Seen(pid=pid, snapshot=collect(pid, window_s=window_s)))
    except VllmdiagError as error:
        return encode(Seen(pid=pid, problem=f"{error.what}: {error.why}".rstrip(": ")))

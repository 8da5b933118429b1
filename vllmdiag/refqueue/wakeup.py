"""Waiting for a message: spin while it is likely to come soon, then sleep until the writer pings.

    reader:  message taken --> spin with sched_yield for busy_loop_s --> sleep in poll --ping--> look at the flags
    writer:  publish the slot --> ping

The ping carries nothing; the flags are the truth. So one ping stands for any number of messages: the writer's end
holds at most one that is not sent yet (SNDHWM=1, more are dropped), the reader's end keeps only the last (CONFLATE).
A reader that spins leaves the ping in its socket, and its next sleep ends at once.

What can go wrong is that the ping is lost while the reader sleeps: then the slot is written, the reader does not
look, and the next message must rescue it. Since 0.29 vLLM's readers look again every 5 s by themselves (`recheck_s`).
"""

from __future__ import annotations

import os
import time
import uuid

import zmq

PING = b"\x00"


class Pinger:
    """The writer's end.

    Args:
        context: of the queue.
        address: ``ipc://`` path to listen on.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.SNDHWM, 1)
        self.socket.bind(address)

    def notify(self) -> None:
        """Wake every reader that sleeps."""
        self.socket.send(PING)


class SpinCondition:
    """The reader's end.

    Args:
        context: of the queue.
        address: where the writer pings; None where it does not, and then `wait` never sleeps.
        busy_loop_s: how long to spin after the last message before sleeping.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str | None, busy_loop_s: float) -> None:
        self._sleeps = address is not None
        self._busy_loop_s = busy_loop_s
        self._last_read = time.monotonic()
        self._pings = context.socket(zmq.SUB)
        self._pings.setsockopt(zmq.CONFLATE, 1)
        self._pings.setsockopt(zmq.SUBSCRIBE, b"")
        if address is not None:
            self._pings.connect(address)
        # A pair inside the process: the one thing that another thread may use to end a sleep.
        inside = f"inproc://{uuid.uuid4()}"
        self._cancel = context.socket(zmq.PAIR)
        self._cancel.bind(inside)
        self._cancelled = context.socket(zmq.PAIR)
        self._cancelled.connect(inside)
        self._poller = zmq.Poller()
        self._poller.register(self._cancelled, zmq.POLLIN)
        self._poller.register(self._pings, zmq.POLLIN)
        self.sockets = (self._pings, self._cancel, self._cancelled)

    def record_read(self) -> None:
        """A message was taken: spin again for a while."""
        self._last_read = time.monotonic()

    def wait(self, timeout_ms: int | None) -> None:
        """Let others run, or sleep until a ping, `cancel` or the timeout. The caller looks at the flags again."""
        if not self._sleeps or time.monotonic() <= self._last_read + self._busy_loop_s:
            os.sched_yield()
        elif self._pings in dict(self._poller.poll(timeout_ms)):
            self._pings.recv(zmq.NOBLOCK)

    def cancel(self) -> None:
        """End the sleep of the reading thread, now and from now on; may be called from one other thread."""
        self._cancel.send(PING)

"""Waiting for a message: spin while it is likely to come soon, then sleep until the writer pings.

    reader:  message taken --> spin, yielding --> spin, napping --> sleep in poll --ping--> look at the flags
    writer:  publish the slot --> ping         (0.3 ms)     (busy_loop_s)

vLLM's reader yields for all of `busy_loop_s`. Where there are fewer cores than processes that takes them from those
who work, so ours naps after the first moment. Before 0.18 readers neither slept nor napped, and so it is in that
dialect.

The ping carries nothing; the flags are the truth. So one ping stands for any number of messages: the writer's end
holds at most one that is not sent yet (SNDHWM=1, more are dropped), the reader's end keeps only the last (CONFLATE).
A reader that spins leaves the ping in its socket, and its next sleep ends at once.

What can go wrong is that the ping is lost while the reader sleeps: then the slot is written, the reader does not
look, and the next message must rescue it. Since 0.27 vLLM's readers look again every 5 s by themselves (`recheck_s`).

vLLM pings with every message, and that is most of what a small message costs. Ours leaves out a ping where it can
prove that the reader will look at the new slot without it. It looks at the flags of the slot before, after the
publish, and for each reader there are two such cases:

1. The reader has not read the slot before. It will, and only then looks at the new one, which is written by now.
   (This takes the fence on both sides: of our store and look, and of its store and look, one must see the other.)
2. The reader has read some slot j, and after that was seen, a ping was sent. Less than `busy_loop_s` ago, counted from
   before j was published, so the reader spins still. That alone is no proof: it may have been stopped between its last
   look at the flags and its look at the clock, and go to sleep when it continues. But then it finds that ping in its
   socket, or still on its way to it, wakes at once, and looks again.

Both build on pings that arrive. So nothing is left out before all readers have subscribed to them, and while messages
flow there is a ping every half `busy_loop_s` in any case: one that was lost is made good as it is by vLLM.
"""

from __future__ import annotations

import os
import time
import uuid

import zmq

from .holdings import Holdings
from .ring import ShmRingBuffer

PING = b"\x00"

YIELD_S = 0.0003
"""How long a reader yields before it naps: longer than the writer takes for the next small message."""

NAP_S = 0.00005
"""One nap; the kernel adds as much again."""


class Pinger:
    """The writer's end.

    Args:
        holdings: of the writer.
        ring: whose readers are to be woken.
        address: ``ipc://`` path to listen on.
        busy_loop_s: how long they spin at least.

    Attributes:
        lost: set to True, pings are lost on the way: what a lost wake-up is made with.
    """

    def __init__(self, holdings: Holdings, ring: ShmRingBuffer, address: str, busy_loop_s: float) -> None:
        self.lost = False
        # To a subscriber it is a PUB. It also tells who has subscribed: before that no ping can reach them.
        self.socket = holdings.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.setsockopt(zmq.SNDHWM, 1)
        self.socket.bind(address)
        self._not_subscribed = ring.geometry.n_readers
        self._ring = ring
        self._trusted_s = busy_loop_s / 2
        self._before_last: float | None = None
        self._spin_until = [0.0] * ring.geometry.n_readers
        self._all_spin_until = 0.0
        self._next_ping_at = 0.0

    def notify(self, slot: int, before: float) -> None:
        """Make sure that every reader will look at a slot that was just published.

        Args:
            slot: which.
            before: `time.monotonic` at some time before it was published.
        """
        now, last, self._before_last = time.monotonic(), self._before_last, before
        if now < self._all_spin_until:
            return
        # Before the second message, and in a ring of one slot, there is no slot before: all may be asleep.
        known = last is not None and self._ring.geometry.chunks > 1
        read = self._ring.read_flags(slot - 1) if known else self._ring.all_read
        may_sleep = any(flag and now >= until for flag, until in zip(read, self._spin_until, strict=True))
        if may_sleep or now >= self._next_ping_at:
            self._ping()
            if self._not_subscribed > 0:
                return
            self._next_ping_at = now + self._trusted_s
            if known and last is not None:
                for reader, flag in enumerate(read):
                    if flag:
                        self._spin_until[reader] = last + self._trusted_s
                self._all_spin_until = min(self._spin_until)

    def _ping(self) -> None:
        # A poll makes zmq see what was delivered since. Without, it may take the last ping for one that is still in its
        # queue, and drop this one although no other is on its way.
        while self.socket.poll(0):
            self._not_subscribed -= self.socket.recv().startswith(b"\x01")
        if not self.lost:
            self.socket.send(PING)


class SpinCondition:
    """The reader's end.

    Args:
        holdings: of the reader.
        address: where the writer pings; None where it does not, and then `wait` never sleeps.
        busy_loop_s: how long to spin after the last message before sleeping.
    """

    def __init__(self, holdings: Holdings, address: str | None, busy_loop_s: float) -> None:
        self._sleeps = address is not None
        self._busy_loop_s = busy_loop_s
        self._last_read = time.monotonic()
        self._pings = holdings.socket(zmq.SUB)
        self._pings.setsockopt(zmq.CONFLATE, 1)
        self._pings.setsockopt(zmq.SUBSCRIBE, b"")
        if address is not None:
            self._pings.connect(address)
        # A pair inside the process: the one thing that another thread may use to end a sleep.
        inside = f"inproc://{uuid.uuid4()}"
        self._cancel = holdings.socket(zmq.PAIR)
        self._cancel.bind(inside)
        self._cancelled = holdings.socket(zmq.PAIR)
        self._cancelled.connect(inside)
        self._poller = zmq.Poller()
        self._poller.register(self._cancelled, zmq.POLLIN)
        self._poller.register(self._pings, zmq.POLLIN)

    def record_read(self) -> None:
        """A message was taken: spin again for a while."""
        self._last_read = time.monotonic()

    def wait(self, timeout_ms: int | None) -> None:
        """Let others run, or sleep until a ping, `cancel` or the timeout. The caller looks at the flags again."""
        idle_s = time.monotonic() - self._last_read
        if idle_s <= YIELD_S or not self._sleeps:
            os.sched_yield()
        elif idle_s <= self._busy_loop_s:
            time.sleep(NAP_S)
        elif self._pings in dict(self._poller.poll(timeout_ms)):
            self._pings.recv(zmq.NOBLOCK)

    def cancel(self) -> None:
        """End the sleep of the reading thread, now and from now on; may be called from one other thread."""
        self._cancel.send(PING)

"""What can go wrong with a queue, each with a type of its own. After any of them the queue still works.

Where vLLM raises a builtin (TimeoutError, RuntimeError("cancelled"), FileNotFoundError), ours is one of those too, so
code written for vLLM's queue catches the same.
"""

from __future__ import annotations

from vllmdiag.model.errors import VllmdiagError


class QueueError(VllmdiagError):
    """The base of all of them."""


class QueueArgumentError(QueueError, ValueError):
    """A queue of that shape cannot be."""


class QueueTimeoutError(QueueError, TimeoutError):
    """The time given was over first; nothing was written or taken."""


class QueueCancelledError(QueueError, RuntimeError):
    """`shutdown` was called, or the event given was set, while waiting."""


class WrongRoleError(QueueError, RuntimeError):
    """A reader cannot enqueue, a writer cannot dequeue."""


class NotPicklableError(QueueError):
    """The object cannot be sent; the cause is what pickle said."""


class TooManyBuffersError(QueueError):
    """More buffers than the 16 bits of their count can tell."""


class BadMessageError(QueueError):
    """A slot or a frame does not hold what the framing promises, or cannot be unpickled here. It counts as read."""


class NoSegmentError(QueueError, FileNotFoundError):
    """There is no segment of that name here: another machine or container, or its creator has ended."""


class NoSpaceError(QueueError, RuntimeError):
    """/dev/shm cannot hold the ring. Without this check the writer would die of SIGBUS later."""


class WrongSizeError(QueueError):
    """The segment has not the size that this shape of ring needs."""


class NotARingError(QueueError):
    """The bytes where the flags should be are no flags."""


class NoSuchReaderError(QueueError, ValueError):
    """The ring has no such reader."""

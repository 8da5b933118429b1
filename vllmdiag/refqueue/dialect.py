"""How releases of vLLM differ on the wire and in waiting. A queue speaks one dialect; the newest is the default."""

from __future__ import annotations

from vllmdiag.model.base import Fact
from vllmdiag.vllm import slots, wakeup
from vllmdiag.vllm.versions import in_range


class Dialect(Fact, frozen=True, kw_only=True):
    """What the two ends must agree on (`counted`), and how a reader waits."""

    counted: bool = True
    """A slot tells how many buffers it holds and how long each is; else it holds one bare pickle (up to 0.11.0)."""
    pings: bool = True
    """The writer pings sleeping readers; else readers never sleep (before 0.18). A reader learns it from the handle."""
    recheck_s: float | None = wakeup.recheck_s(None)
    """How long a sleeping reader trusts that a ping will come before it looks at the flags itself. None (before 0.27):
    for ever, so one lost ping is a hang."""
    busy_loop_s: float = 1.0
    """How long a reader spins after its last message before it sleeps."""
    warn_every_s: float = 60.0
    """A wait is logged each time that it has lasted this long again (VLLM_RINGBUFFER_WARNING_INTERVAL)."""

    @classmethod
    def of(cls, version: str) -> Dialect:
        """What that release of vLLM speaks."""
        spoken = [framing for framing in slots.framings() if in_range(version, framing.since, framing.until)]
        return cls(
            counted=spoken[-1].length_at is not None,
            pings=wakeup.pings(version),
            recheck_s=wakeup.recheck_s(version),
        )


NEWEST = Dialect()

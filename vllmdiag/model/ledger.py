"""The ledger: who copies what on the way of a request and in a step of the executor; and, live, where the time goes.

Bytes and seconds. `vllmdiag.plan.ledger` makes the entries, `vllmdiag.diagnosis.timing` the times.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Fact
from .plan import Topology

LEDGER_SCHEMA = "vllmdiag.ledger/1"

Where = Literal["user", "kernel", "shared", "network", "device"]
"""``user``: one process, its own memory. ``kernel``: into and out of a socket of this node. ``shared``: into or out of
/dev/shm. ``network``: the same as kernel, and over the wire to another node. ``device``: to or from a GPU."""


class Load(Fact, frozen=True, kw_only=True):
    """What is sent."""

    prompt_tokens: int = 1000
    prompt_bytes: int = 4000
    output_tokens: int = 100
    batch: int = 1
    """Requests in one step."""
    tensor_bytes: int = 0
    """Of one array that comes with the request (image, audio, embeddings) and goes the whole way."""


class Entry(Fact, frozen=True, kw_only=True):
    """One copy or one change of form."""

    stage: str
    """``client``, ``API queue``, ``input``, ``scheduler``, ``ring``, ``compute``, ``reply``, ``output``, ``client``."""
    what: str
    by: str
    where: Where
    bytes: int
    """Once."""
    times: int = 1
    """Readers, or halves of a way through the kernel."""

    @property
    def total(self) -> int:
        """All of it together."""
        return self.bytes * self.times


class LayerTime(Fact, frozen=True, kw_only=True):
    """How long one layer takes."""

    layer: str
    """``API server, input, output``, ``scheduler queue``, ``ring wait``, ``compute``, ``reply``, ``engine`` ..."""
    per: str
    """``request`` or ``step``."""
    seconds: float | None = None
    """Mean over the window; None where it is not known."""
    share: float | None = None
    """Of the watched time; only for what was seen in the rings."""
    how: str = ""
    """How it is known, or why it is not."""


class Ledger(Fact, frozen=True, kw_only=True):
    """The whole account."""

    schema: str = LEDGER_SCHEMA
    topology: Topology
    load: Load
    request: tuple[Entry, ...]
    """From the client to the scheduler, once for each request."""
    step: tuple[Entry, ...]
    """Of one step with `load.batch` requests that decode; its first step also carries the prompt."""
    request_bytes: int
    """Sum over `request`."""
    step_bytes: int
    sums: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes of one step by place."""
    notes: tuple[str, ...] = ()
    times: tuple[LayerTime, ...] = ()
    """Only of a live server."""
    steps_seen: int = 0
    window_s: float = 0.0
    sources: tuple[str, ...] = ()

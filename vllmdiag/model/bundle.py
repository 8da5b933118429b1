"""What stands in front of a bundle: who wrote it, of whom, what is in it, what is missing, whether it is redacted."""

from __future__ import annotations

from typing import Literal

from .base import Fact, Missing
from .diagnosis import Cost, Target

BUNDLE_SCHEMA = "vllmdiag.bundle/1"
ESTIMATE_SCHEMA = "vllmdiag.estimate/1"

TokenKey = Literal["host", "ephemeral", "none"]
"""``host``: a key that stays on the host, so that its bundles can be compared. ``ephemeral``: made for this bundle
alone, because the other could not be kept. ``none``: nothing was redacted."""


class BundleFile(Fact, frozen=True, kw_only=True):
    """One member of the archive."""

    name: str
    """Below the directory of the bundle, e.g. ``raw/stacks.txt``."""
    about: str
    """What it holds, in words."""
    size: int
    """Bytes."""
    sha256: str


class Redaction(Fact, frozen=True, kw_only=True):
    """Whether hosts, addresses, users, paths below homes and secrets were replaced by tokens."""

    redacted: bool
    key: TokenKey = "none"
    key_id: str = ""
    """Fingerprint of the key: tokens of two bundles can be compared where it is the same."""
    note: str = ""
    """Why the key is ephemeral; empty otherwise."""


class Moment(Fact, frozen=True, kw_only=True):
    """One snapshot of the bundle, and what was said of it."""

    file: str
    observed_at: str
    window_s: float
    status: str
    cause: str
    summary: str


class Manifest(Fact, frozen=True, kw_only=True):
    """The first member of the archive, ``manifest.json``."""

    schema: str = BUNDLE_SCHEMA
    tool: str = ""
    """Version of vllmdiag that wrote it."""
    observed_at: str = ""
    """End of the last window, RFC 3339 UTC."""
    target: Target = Target()
    redaction: Redaction
    snapshots: tuple[Moment, ...]
    """Oldest first; the last one is ``snapshot.json``."""
    files: tuple[BundleFile, ...] = ()
    """All members but this one."""
    missing: tuple[Missing, ...] = ()
    """What could not be observed."""
    cost: Cost = Cost()


class Estimate(Fact, frozen=True, kw_only=True):
    """What `capture` would cost. Half and twice as much are possible."""

    schema: str = ESTIMATE_SCHEMA
    processes: int
    snapshots: int
    seconds: float
    size: int
    """Bytes of the file."""

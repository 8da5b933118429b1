"""The Diagnosis: verdict, layers, findings, what is missing. The JSON that other programs rely on (see DESIGN.md)."""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import Fact, Missing

DIAGNOSIS_SCHEMA = "vllmdiag.diagnosis/1"

Status = Literal["ok", "warning", "critical", "unknown"]
LayerStatus = Literal["ok", "fault", "suspect", "unknown"]
Severity = Literal["info", "warning", "critical"]
Confidence = Literal["high", "medium", "low"]

LAYER_NAMES = {0: "healthy", 1: "process", 2: "handshake", 3: "queue", 4: "gpu", 5: "client"}


class Subject(Fact, frozen=True, kw_only=True):
    """Which process (or rank, or peer) something is about."""

    role: str
    """``APIServer``, ``EngineCore``, ``Worker``, ``DPCoordinator``, ``ResourceTracker``, ``Client``, ``Host`` ..."""
    pid: int | None = None
    """None where the process is gone or on another machine."""
    rank: dict[str, int] = msgspec.field(default_factory=dict)
    """e.g. ``{"tp": 1}``; ``{"dp": 0}`` for an engine; ``{"index": 1}`` for the second API server."""
    node: str | None = None
    label: str = ""
    """The name people see, e.g. ``Worker_TP1`` or ``EngineCore_DP0/Worker_TP1``."""


class Link(Fact, frozen=True, kw_only=True):
    """One step of the chain of waits, from the client to the root."""

    subject: Subject
    doing: str
    """What it does or waits for, in a few words."""


class NextStep(Fact, frozen=True, kw_only=True):
    """A command to run next, why, and what it may cost."""

    command: str
    why: str
    risk: str
    """``none`` (read-only), or what it may break."""


class Finding(Fact, frozen=True, kw_only=True):
    """One thing that was found, with the evidence for it."""

    cause: str
    """Slug of the catalogue."""
    layer: int
    severity: Severity
    confidence: Confidence
    subject: Subject
    summary: str
    evidence: tuple[str, ...] = ()
    chain: tuple[Link, ...] = ()
    next: tuple[NextStep, ...] = ()
    since_s: float | None = None
    """For at least how long, seconds; None where it cannot be known."""
    folded_into: str | None = None
    """Cause of the finding that explains this one; None for a root."""


class Verdict(Fact, frozen=True, kw_only=True):
    """The first blocker, or the healthy state."""

    status: Status
    cause: str
    layer: int
    subject: Subject
    since_s: float | None
    confidence: Confidence
    summary: str
    chain: tuple[Link, ...] = ()
    next: tuple[NextStep, ...] = ()
    evidence: tuple[str, ...] = ()


class LayerResult(Fact, frozen=True, kw_only=True):
    """What one layer looks like."""

    layer: int
    name: str
    status: LayerStatus
    summary: str


class Target(Fact, frozen=True, kw_only=True):
    """The instance that was judged."""

    api_server_pids: tuple[int, ...] = ()
    engine_pids: tuple[int, ...] = ()
    worker_pids: tuple[int, ...] = ()
    coordinator_pids: tuple[int, ...] = ()
    vllm_version: str | None = None
    port: int | None = None


class Cost(Fact, frozen=True, kw_only=True):
    """What the look cost."""

    wall_s: float = 0.0
    ptrace_calls: int = 0
    processes_dumped: int = 0
    sources: dict[str, float] = msgspec.field(default_factory=dict)


class Diagnosis(Fact, frozen=True, kw_only=True):
    """The whole answer."""

    schema: str = DIAGNOSIS_SCHEMA
    tool: str = ""
    observed_at: str = ""
    window_s: float = 0.0
    target: Target = Target()
    verdict: Verdict
    layers: tuple[LayerResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    missing: tuple[Missing, ...] = ()
    cost: Cost = Cost()

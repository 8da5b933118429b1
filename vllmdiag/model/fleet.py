"""A fleet: what each node answered, and one diagnosis over all of them.

`NodeReport` is what an engine brings back of one node (the snapshots of its instances, or why there are none);
`FleetDiagnosis` is what `vllmdiag.fleet` makes of all reports. Durations are seconds.
"""

from __future__ import annotations

from typing import Literal

from .base import Fact, Missing
from .diagnosis import Finding, Status, Verdict
from .snapshot import Snapshot

FLEET_SCHEMA = "vllmdiag.fleet/1"

Outcome = Literal["answered", "empty", "silent", "refused", "garbage"]
"""What became of asking a node.

``answered``: with snapshots. ``empty``: it answered that no vLLM runs there. ``silent``: it had not answered at its
deadline. ``refused``: it could not be reached, or the collector did not run. ``garbage``: what came is no answer.
"""


class NodeReport(Fact, frozen=True, kw_only=True):
    """One node, as it answered."""

    node: str
    """The name under which it was asked."""
    outcome: Outcome
    snapshots: tuple[Snapshot, ...] = ()
    """One for each instance on it."""
    problem: str = ""
    """Why there is nothing, or not everything, in words."""
    tool: str = ""
    """Version of vllmdiag that ran there."""
    took_s: float = 0.0
    skew_s: float | None = None
    """Its clock minus ours; None where both were not read together."""
    skew_within_s: float | None = None
    """The true skew lies within this of it."""


class NodeLine(Fact, frozen=True, kw_only=True):
    """One node in the list of all."""

    node: str
    outcome: Outcome
    status: Status
    summary: str
    instances: int = 0
    tool: str = ""
    took_s: float = 0.0
    skew_s: float | None = None
    skew_within_s: float | None = None


class FirstError(Fact, frozen=True, kw_only=True):
    """The earliest error that the logs of a job show."""

    node: str
    file: str
    number: int
    text: str
    at: str
    """As the log says it, on the clock of its node."""


class JobDiagnosis(Fact, frozen=True, kw_only=True):
    """One server, on however many nodes."""

    name: str
    """``node07`` or ``node[01-04]`` with the port or model that tells it from others there."""
    nodes: tuple[str, ...]
    """In rank order."""
    nodes_expected: int
    """By its arguments; more than `nodes` where some were not seen."""
    members: int
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    """Of all its nodes, the root first; what it explains is folded into it."""
    first_error: FirstError | None = None


class FleetDiagnosis(Fact, frozen=True, kw_only=True):
    """The whole answer."""

    schema: str = FLEET_SCHEMA
    tool: str = ""
    observed_at: str = ""
    """End of the latest window, by the clock of its node."""
    engine: str = ""
    verdict: Verdict
    """Of the job that is worst."""
    jobs: tuple[JobDiagnosis, ...] = ()
    """The worst first."""
    nodes: tuple[NodeLine, ...] = ()
    missing: tuple[Missing, ...] = ()

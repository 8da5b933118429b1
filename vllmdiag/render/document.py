"""JSON for other programs: one document, same bytes for the same value, and the JSON Schema of it."""

from __future__ import annotations

import msgspec

from vllmdiag.model.bundle import BUNDLE_SCHEMA, ESTIMATE_SCHEMA, Estimate, Manifest
from vllmdiag.model.check import BASELINE_SCHEMA, CHECK_SCHEMA, Baseline, CheckResult
from vllmdiag.model.diagnosis import DIAGNOSIS_SCHEMA, Diagnosis
from vllmdiag.model.diff import DIFF_SCHEMA, Diff
from vllmdiag.model.fleet import FLEET_SCHEMA, FleetDiagnosis
from vllmdiag.model.ledger import LEDGER_SCHEMA, Ledger
from vllmdiag.model.plan import PLAN_CHECK_SCHEMA, PLAN_SCHEMA, Plan, PlanCheck
from vllmdiag.model.playbook import EXPLANATIONS_SCHEMA, PLAYBOOKS_SCHEMA, Explanations, Playbooks
from vllmdiag.model.snapshot import SNAPSHOT_SCHEMA, Snapshot
from vllmdiag.model.stacks import STACKS_SCHEMA, MergedStacks
from vllmdiag.model.view import INSTANCES_SCHEMA, REMOVALS_SCHEMA, VIEW_SCHEMA, Instances, InstanceView, Removals
from vllmdiag.model.watch import EVENT_SCHEMA, Event

DOCUMENTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "diagnosis": (DIAGNOSIS_SCHEMA, Diagnosis),
    "check": (CHECK_SCHEMA, CheckResult),
    "baseline": (BASELINE_SCHEMA, Baseline),
    "event": (EVENT_SCHEMA, Event),
    "snapshot": (SNAPSHOT_SCHEMA, Snapshot),
    "bundle": (BUNDLE_SCHEMA, Manifest),
    "estimate": (ESTIMATE_SCHEMA, Estimate),
    "diff": (DIFF_SCHEMA, Diff),
    "view": (VIEW_SCHEMA, InstanceView),
    "stacks": (STACKS_SCHEMA, MergedStacks),
    "instances": (INSTANCES_SCHEMA, Instances),
    "removals": (REMOVALS_SCHEMA, Removals),
    "playbooks": (PLAYBOOKS_SCHEMA, Playbooks),
    "explanations": (EXPLANATIONS_SCHEMA, Explanations),
    "fleet": (FLEET_SCHEMA, FleetDiagnosis),
    "ledger": (LEDGER_SCHEMA, Ledger),
    "plan": (PLAN_SCHEMA, Plan),
    "plan-check": (PLAN_CHECK_SCHEMA, PlanCheck),
}
"""Name on the command line -> (value of its `schema` field, struct)."""


def to_json(value: object) -> str:
    """One JSON document, indented, fields in the order of the struct, mappings and sets sorted, newline at the end."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode() + "\n"


def json_schema(name: str) -> str:
    """The JSON Schema (2020-12) of a document.

    Args:
        name: a key of `DOCUMENTS`.

    Raises:
        KeyError: no such document.
    """
    identity, struct = DOCUMENTS[name]
    schema = msgspec.json.schema(struct)
    schema["$defs"][struct.__name__]["properties"]["schema"] = {"const": identity}
    return to_json({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": identity, **schema})

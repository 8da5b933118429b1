"""Every page kept as a golden file. `python -m tests.unit.render.goldens` writes them anew, to be read in the diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.unit.check import results
from tests.unit.fleet.nodes import fleet
from tests.unit.render import samples
from tests.unit.watch import pictures
from vllmdiag.diagnosis.merged_stacks import merged
from vllmdiag.model.ledger import Load
from vllmdiag.model.plan import Topology
from vllmdiag.model.view import Instances, Removal
from vllmdiag.plan.ledger import ledger
from vllmdiag.plan.make import plan
from vllmdiag.render.check import check_text
from vllmdiag.render.client import client_text
from vllmdiag.render.document import json_schema, to_json
from vllmdiag.render.endpoints import endpoints_text
from vllmdiag.render.fleet import fleet_text
from vllmdiag.render.github import github_text
from vllmdiag.render.junit import junit_text
from vllmdiag.render.ledger import ledger_text
from vllmdiag.render.live import live_text
from vllmdiag.render.nagios import nagios_text
from vllmdiag.render.openmetrics import openmetrics_text
from vllmdiag.render.page import Style
from vllmdiag.render.plan import plan_text
from vllmdiag.render.ps import instances_text, ps_text
from vllmdiag.render.recording import recording_text
from vllmdiag.render.ring import ring_text
from vllmdiag.render.shm import orphans_text, removals_text, shm_text
from vllmdiag.render.stacks import merged_text, stacks_text
from vllmdiag.render.verdict import diagnosis_text
from vllmdiag.watch.replay import stills

DIRECTORY = Path(__file__).parent / "golden"

_PLAIN = Style()
_REMOVALS = (
    Removal(name="psm_dead0001", removed=True, freed=90112),
    Removal(name="psm_dead0003", removed=False, why="held by pid 4100 now"),
)

PAGES: dict[str, Callable[[], str]] = {
    "critical.txt": lambda: diagnosis_text(samples.critical(), _PLAIN),
    "critical-verbose.txt": lambda: diagnosis_text(samples.critical(), Style(verbose=1)),
    "critical-60-columns.txt": lambda: diagnosis_text(samples.critical(), Style(width=60)),
    "critical-colour.txt": lambda: diagnosis_text(samples.critical(), Style(colour=True)),
    "critical-ascii.txt": lambda: diagnosis_text(samples.critical(), Style(ascii=True)),
    "critical.json": lambda: to_json(samples.critical()),
    "idle.txt": lambda: diagnosis_text(samples.idle(), _PLAIN),
    "idle.json": lambda: to_json(samples.idle()),
    "unknown.txt": lambda: diagnosis_text(samples.unknown(), _PLAIN),
    "unknown.json": lambda: to_json(samples.unknown()),
    "warning.txt": lambda: diagnosis_text(samples.warning(), _PLAIN),
    "ps.txt": lambda: ps_text(samples.instance(), _PLAIN),
    "ps-instances.txt": lambda: instances_text(samples.instances(), _PLAIN),
    "ps-instances.json": lambda: to_json(Instances(instances=samples.instances())),
    "endpoints.txt": lambda: endpoints_text(samples.instance(), _PLAIN),
    "shm.txt": lambda: shm_text(samples.instance(), _PLAIN),
    "shm-without-vllm.txt": lambda: shm_text(samples.leftovers(), _PLAIN),
    "shm-clean.txt": lambda: orphans_text(samples.instance(), _PLAIN),
    "shm-clean-yes.txt": lambda: removals_text(_REMOVALS, _PLAIN),
    "ring.txt": lambda: ring_text(samples.instance(), _PLAIN),
    "ring-ascii.txt": lambda: ring_text(samples.instance(), Style(ascii=True)),
    "stacks.txt": lambda: stacks_text(samples.instance(), _PLAIN),
    "stacks-merged.txt": lambda: merged_text(merged(samples.parted()), _PLAIN),
    "stacks-merged.json": lambda: to_json(merged(samples.parted())),
    "stacks-verbose.txt": lambda: stacks_text(samples.instance(), Style(verbose=1)),
    "client.txt": lambda: client_text(samples.instance(), _PLAIN),
    "ledger.txt": lambda: ledger_text(ledger(Topology(tp=8), Load(batch=4, tensor_bytes=20 << 20)), _PLAIN),
    "fleet.txt": lambda: fleet_text(fleet(), _PLAIN),
    "fleet.json": lambda: to_json(msgspec.structs.replace(fleet(), jobs=fleet().jobs[:1], nodes=fleet().nodes[-4:])),
    "plan.txt": lambda: plan_text(plan(Topology(nodes=48, tp=8)), _PLAIN),
    "plan-several-nodes.txt": lambda: plan_text(plan(Topology(nodes=4, tp=8, pp=2, dp=2, ep=True)), Style(verbose=1)),
    "plan.json": lambda: to_json(plan(Topology(tp=2))),
    "view.json": lambda: to_json(samples.instance()),
    "check.txt": lambda: check_text(results.fault(), _PLAIN),
    "check-verbose.txt": lambda: check_text(results.fault(), Style(verbose=1)),
    "check-fine.txt": lambda: check_text(results.fine(), _PLAIN),
    "check.json": lambda: to_json(results.fault()),
    "check.junit.xml": lambda: junit_text(results.fault()),
    "check.nagios.txt": lambda: nagios_text(results.fault()),
    "check.openmetrics.txt": lambda: openmetrics_text(results.fault()),
    "check.github.txt": lambda: github_text(results.fault()),
    "check.schema.json": lambda: json_schema("check"),
    "live-moving.txt": lambda: live_text(pictures.moving(), _PLAIN),
    "live-stalled.txt": lambda: live_text(pictures.stalled(), _PLAIN),
    "live-stalled-ascii-60-columns.txt": lambda: live_text(pictures.stalled(), Style(ascii=True, width=60)),
    "live-waiting.txt": lambda: live_text(pictures.waiting(), _PLAIN),
    "recording.txt": lambda: recording_text(
        pictures.recording(), {g.begin.generation: stills(g) for g in pictures.recording().generations}, _PLAIN
    ),
    "event.schema.json": lambda: json_schema("event"),
    "diagnosis.schema.json": lambda: json_schema("diagnosis"),
    "bundle.schema.json": lambda: json_schema("bundle"),
    "snapshot.schema.json": lambda: json_schema("snapshot"),
    "diff.schema.json": lambda: json_schema("diff"),
}


if __name__ == "__main__":
    for name, write in PAGES.items():
        (DIRECTORY / name).write_text(write(), encoding="utf-8")

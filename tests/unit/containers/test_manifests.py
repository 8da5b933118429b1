"""The Kubernetes examples: parsed, and held against what vllmdiag needs to see and what a cluster would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.commands import parse
from vllmdiag.cli.verbs.check import _WINDOW_S

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "docs" / "kubernetes").glob("*.yaml"))
DOCUMENTS = {path.stem: list(yaml.safe_load_all(path.read_text(encoding="utf-8"))) for path in FILES}
NEEDED = {"SYS_PTRACE", "DAC_READ_SEARCH"}

Manifest = dict[str, Any]


def _pods() -> Iterator[tuple[str, Manifest, Manifest]]:
    """(file, metadata of the pod, its spec)."""
    for name, documents in DOCUMENTS.items():
        for document in documents:
            if document.get("kind") == "Deployment":
                template = document["spec"]["template"]
                assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
                yield name, template["metadata"], template["spec"]
            elif document.get("kind") == "Pod":
                yield name, document["metadata"], document["spec"]


PODS = list(_pods())
CONTAINERS = [(name, spec, container) for name, _, spec in PODS for container in spec["containers"]]
OURS = [(name, spec, c) for name, spec, c in CONTAINERS if c["image"].startswith("vllmdiag:")]
THEIRS = [(name, spec, c) for name, spec, c in CONTAINERS if not c["image"].startswith("vllmdiag:")]


def test_there_is_an_example_for_each_way() -> None:
    assert set(DOCUMENTS) == {"sidecar", "probes", "debug-container", "same-user", "metrics", "fleet-rbac"}
    assert len(OURS) == 3
    assert len(THEIRS) == 4
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert all(f"](kubernetes/{path.name})" in text for path in FILES)


@pytest.mark.parametrize(("name", "spec", "container"), OURS, ids=[name for name, _, _ in OURS])
def test_our_container_runs_a_command_that_exists_and_sees_the_processes_of_the_pod(
    name: str, spec: Manifest, container: Manifest
) -> None:
    parse([str(word) for word in container["args"]])
    assert "command" not in container, "the image has an entry point"
    assert spec["shareProcessNamespace"] is True
    assert len(spec["containers"]) == 2


def _security(spec: Manifest, container: Manifest) -> Manifest:
    """What holds for the container: its own settings over those of the pod."""
    return {**spec.get("securityContext", {}), **container.get("securityContext", {})}


@pytest.mark.parametrize(("name", "spec", "container"), OURS, ids=[name for name, _, _ in OURS])
def test_our_container_may_look_and_nothing_else(name: str, spec: Manifest, container: Manifest) -> None:
    security = _security(spec, container)
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    if name == "same-user":
        (other,) = [c for c in spec["containers"] if c is not container]
        assert "add" not in security["capabilities"]
        assert security["runAsUser"] == _security(spec, other)["runAsUser"]
        assert security["runAsUser"] > 0
        assert security["runAsNonRoot"] is True
    else:
        assert set(security["capabilities"]["add"]) == NEEDED
        assert security["runAsUser"] == 0, "an added capability has an effect for root only"


@pytest.mark.parametrize(("name", "spec", "container"), CONTAINERS, ids=[f"{n}-{c['name']}" for n, _, c in CONTAINERS])
def test_what_is_mounted_is_a_volume_and_what_is_not_needed_is_not_asked_for(
    name: str, spec: Manifest, container: Manifest
) -> None:
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)
    assert "privileged" not in container.get("securityContext", {})
    assert all("hostPath" not in volume for volume in spec["volumes"])


@pytest.mark.parametrize(("name", "spec", "container"), OURS, ids=[name for name, _, _ in OURS])
def test_what_is_written_has_a_place_on_a_root_file_system_that_is_read_only(
    name: str, spec: Manifest, container: Manifest
) -> None:
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/tmp" in mounts
    words = container["args"]
    if "--bundles" in words:
        assert words[words.index("--bundles") + 1] in mounts
        (state,) = [one["value"] for one in container["env"] if one["name"] == "XDG_STATE_HOME"]
        assert any(state.startswith(f"{mount}/") for mount in mounts)
    assert {"memory"} <= set(container["resources"]["limits"])


@pytest.mark.parametrize(("name", "spec", "container"), THEIRS, ids=[name for name, _, _ in THEIRS])
def test_the_server_has_shared_memory_that_is_large_enough(name: str, spec: Manifest, container: Manifest) -> None:
    (mount,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) >= 4
    assert "nvidia.com/gpu" in container["resources"]["limits"]


def test_probes_ask_with_a_command_that_exists_and_more_time_than_it_takes() -> None:
    ((_, _, container),) = [one for one in CONTAINERS if one[0] == "probes"]
    for kind in ("liveness", "readiness"):
        probe = container[f"{kind}Probe"]
        program, *args = probe["exec"]["command"]
        assert program == "vllmdiag"
        assert args == ["check", "--profile", kind]
        parse(args)
        assert probe["timeoutSeconds"] >= 10 * _WINDOW_S[kind]
        assert probe["periodSeconds"] > probe["timeoutSeconds"]
    assert "startupProbe" not in container


def test_the_port_that_is_scraped_is_the_one_that_is_listened_on() -> None:
    ((_, metadata, _),) = [pod for pod in PODS if pod[0] == "metrics"]
    ((_, _, container),) = [one for one in OURS if one[0] == "metrics"]
    port = int(container["args"][container["args"].index("--listen") + 1].rpartition(":")[2])
    assert [p["containerPort"] for p in container["ports"]] == [port]
    assert metadata["annotations"]["prometheus.io/port"] == str(port)


def test_the_ephemeral_container_gets_its_security_and_nothing_that_kubectl_sets_itself() -> None:
    (document,) = DOCUMENTS["debug-container"]
    assert set(document) == {"securityContext"}
    assert set(document["securityContext"]["capabilities"]["add"]) == NEEDED
    assert document["securityContext"]["runAsUser"] == 0


def test_the_fleet_may_list_pods_and_run_a_command_in_them_and_no_more() -> None:
    role, binding = DOCUMENTS["fleet-rbac"]
    granted = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    assert granted == {("pods", "get"), ("pods", "list"), ("pods/exec", "create"), ("pods/exec", "get")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]


def test_yaml_that_yaml_would_read_otherwise_is_none_of_ours() -> None:
    """An unquoted ``off``, or an octal number: what stands in an argument must be text."""
    for _, _, container in CONTAINERS:
        words = [*container.get("args", ()), *(one["value"] for one in container.get("env", ()))]
        assert all(isinstance(word, str) for word in words)
    assert not [path for path in FILES if re.search(r"\t", path.read_text(encoding="utf-8"))]

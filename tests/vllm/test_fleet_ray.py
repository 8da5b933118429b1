"""`fleet diagnose --engine ray` on a real cluster of three nodes: one verdict, on the right node."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lab.pidnodes import PidNode, pid_nodes
from tests.vllm.server import free_ports
from tests.vllm.setup_ray import ensure_ray

pytestmark = pytest.mark.needs("root", "unshare", "nsenter")
_RANDOM_PORTS = (
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
    "--dashboard-agent-grpc-port=0",
    "--metrics-export-port=0",
)


class Cluster:
    """Ray on nodes that are pid namespaces of this machine."""

    def __init__(self, nodes: dict[str, PidNode], python: Path, work: str, ends: ExitStack) -> None:
        self.nodes, self.python, self.ends = nodes, python, ends
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        first, *others = nodes
        self._start(first, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={work}")
        for name in others:
            self._start(name, f"--address={self.address}")

    def _start(self, name: str, *how: str) -> None:
        """Until the node is part of the cluster. It ends with its namespace."""
        words = [str(self.python), "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *how]
        words += [f"--node-name={name}", "--num-cpus=1", "--object-store-memory=80000000", *_RANDOM_PORTS]
        words += ["--node-ip-address=127.0.0.1"]
        ray = subprocess.Popen(
            self.nodes[name].inside(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert ray.stdout is not None
        self.ends.callback(ray.stdout.close)
        self.ends.callback(ray.wait)
        self.ends.callback(ray.kill)
        said = []
        for line in ray.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError("".join(said[-20:]))

    def diagnose(self, *more: str) -> tuple[int, dict[str, Any]]:
        """From the head, as an operator would."""
        words = ["fleet", "diagnose", "--engine", "ray", "--ray-address", self.address, "--format", "json", *more]
        words += ["--ray-python", str(self.python), "--window", "1", "--deadline", "60"]
        head = next(iter(self.nodes.values()))
        done = subprocess.run(
            head.inside(sys.executable, "-m", "vllmdiag", *words), capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    python = ensure_ray()
    with tempfile.TemporaryDirectory(prefix="ray") as work, ExitStack() as ends:
        nodes = ends.enter_context(pid_nodes(n1=None, n2="worker-stopped", n3=None))
        yield Cluster(nodes, python, work, ends)


def test_every_node_of_a_ray_cluster_is_asked_and_the_stopped_rank_found_on_its_node(cluster: Cluster) -> None:
    code, fleet = cluster.diagnose("--remote-command", f"{sys.executable} -m vllmdiag")
    verdict = fleet["verdict"]
    assert {n["node"]: n["outcome"] for n in fleet["nodes"]} == dict.fromkeys(("n1", "n2", "n3"), "answered")
    assert (code, verdict["cause"]) == (2, "process-stopped")
    assert (verdict["subject"]["node"], verdict["subject"]["label"]) == ("n2", "Worker_TP1")


def test_where_vllmdiag_is_not_installed_every_node_says_so(cluster: Cluster) -> None:
    code, fleet = cluster.diagnose("--remote-command", "no-such-program")
    assert code == 3
    assert all(n["outcome"] == "refused" and "--ship" in n["summary"] for n in fleet["nodes"])

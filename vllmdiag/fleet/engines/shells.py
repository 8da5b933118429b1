"""Nodes that are reached by a program of their engine: ssh, kubectl exec, srun."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence

import msgspec

from vllmdiag.fleet.ask import Errand
from vllmdiag.fleet.command import Far
from vllmdiag.model.errors import HelperMissingError, TargetError, UsageError

_LANGUAGE = re.compile(r"[][!&^*%]|(^|[,\s])@")
"""What only ClusterShell reads: ranges, operators, groups. ``root@host`` is a plain name."""
_LIST_S = 30.0
"""For a list of nodes."""


def ssh(nodes: str, far: Far, options: Sequence[str] = (), connect_s: float = 10.0) -> tuple[Errand, ...]:
    """One ssh for each node of a node set: ``gpu[01-48]``, ``a,b``, ``@group``.

    Raises:
        HelperMissingError: the set has ranges or groups and ClusterShell is not installed.
        UsageError: it is no node set, or empty.
    """
    # Never a question: it would wait for an answer that nobody gives.
    words = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(connect_s))}", *options)
    command = shlex.join(far.words)
    return tuple(Errand(node, (*words, "--", node, command), far.stdin) for node in node_set(nodes))


def node_set(text: str) -> tuple[str, ...]:
    """The names of a node set. Raises as `ssh` does."""
    if not _LANGUAGE.search(text):
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise UsageError("no nodes are named", why="the node set is empty", next="--nodes gpu01,gpu02")
        return names
    try:
        from ClusterShell.NodeSet import NodeSet, NodeSetException
    except ImportError:
        raise HelperMissingError(
            f"the node set {text} needs ClusterShell",
            why="ranges and groups are its language, and it is not installed",
            next="pip install 'vllmdiag[fleet]', or name the nodes one by one with commas",
        ) from None
    try:
        names = tuple(NodeSet(text))
    except NodeSetException as error:
        raise UsageError(f"{text} is no node set", why=str(error), next="--nodes 'gpu[01-48]'") from None
    if not names:
        raise UsageError("no nodes are named", why=f"{text} is empty", next="--nodes 'gpu[01-48]'")
    return names


class _Meta(msgspec.Struct, frozen=True):
    name: str
    namespace: str = ""


class _Status(msgspec.Struct, frozen=True):
    phase: str = ""


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    status: _Status = _Status()


class _Pods(msgspec.Struct, frozen=True):
    items: tuple[_Pod, ...] = ()


def kubectl(
    selector: str, far: Far, namespace: str | None = None, container: str | None = None, context: str | None = None
) -> tuple[Errand, ...]:
    """One `kubectl exec` for each running pod that a label selector finds.

    Raises:
        TargetError: it finds none.
        HelperMissingError, UsageError: kubectl is not there, or fails.
    """
    base = ["kubectl", *(["--context", context] if context else [])]
    place = ["--namespace", namespace] if namespace else []
    text = _output([*base, "get", "pods", *place, "--selector", selector, "--output", "json"])
    try:
        pods = msgspec.json.decode(text, type=_Pods).items
    except msgspec.DecodeError as error:
        raise UsageError("kubectl did not list pods", why=str(error), next="kubectl get pods -o json") from None
    running = [pod for pod in pods if pod.status.phase in ("Running", "")]
    if not running:
        others = ", ".join(f"{pod.metadata.name} is {pod.status.phase}" for pod in pods[:5])
        raise TargetError(
            f"no running pod has the labels {selector}", why=others or "none has them", next="kubectl get pods -l ..."
        )
    inside = ["--container", container] if container else []
    return tuple(
        Errand(
            pod.metadata.name,
            (*base, "exec", "--stdin", *place, pod.metadata.name, *inside, "--", *far.words),
            far.stdin,
        )
        for pod in running
    )


def slurm(far: Far, job: str | None = None) -> tuple[Errand, ...]:
    """One `srun` step for each node of a job, beside the steps that run there.

    Args:
        far: what is run.
        job: its id; None: the job that this shell is in.

    Raises:
        TargetError: no job is given and this shell is in none.
        HelperMissingError, UsageError: Slurm's programs are not there, or fail.
    """
    number = job or os.environ.get("SLURM_JOB_ID")
    if not number:
        raise TargetError(
            "which job is not known", why="this shell is in none (SLURM_JOB_ID is not set)", next="--job ID"
        )
    nodes = os.environ.get("SLURM_JOB_NODELIST") if job in (None, os.environ.get("SLURM_JOB_ID")) else None
    if not nodes:
        nodes = _output(["squeue", "--noheader", "--jobs", number, "--format", "%N"]).decode().strip()
    names = _output(["scontrol", "show", "hostnames", nodes]).decode().split()
    base = ("srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet")
    return tuple(Errand(name, (*base, f"--nodelist={name}", *far.words), far.stdin) for name in names)


def _output(argv: Sequence[str]) -> bytes:
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=_LIST_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise HelperMissingError(
            f"{argv[0]} is not installed", why="nodes of this engine are reached with it", next="run it where it is"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{argv[0]} gives no answer", why=f"not within {_LIST_S:g} s", next=shlex.join(argv)) from None
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(
            f"{argv[0]} failed", why=words[-1] if words else f"exit code {done.returncode}", next=shlex.join(argv)
        )
    return done.stdout

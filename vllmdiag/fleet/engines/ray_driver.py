"""Runs in the Python of a Ray cluster, given to it as text: one task that asks for no resources on every live node.

It knows nothing of vllmdiag and needs nothing but Ray: a job as JSON on stdin, a line of JSON for each node on stdout.
The task's function lives in ``__main__``, so Ray sends it by value and the nodes need no file of ours.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from typing import Any

SLACK_S = 10.0
"""For Ray to start a process for a task; the command itself has its deadline."""


def run_there(command: list[str], data: bytes, deadline_s: float) -> tuple[int | None, bytes, bytes]:
    """Run the command on the node of this task: (exit code or None, stdout, stderr)."""
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        return None, error.stdout or b"", b""
    except OSError as error:
        return 127, b"", str(error).encode()
    return done.returncode, done.stdout, done.stderr[-8192:]


def say(**line: object) -> None:
    """One line for who has started us."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def names_of(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Node id -> a name that people know it by: its own where it is unique, else with the start of its id."""
    names = {node["NodeID"]: node.get("NodeName") or node.get("NodeManagerHostname") or "" for node in nodes}
    hosts = [node.get("NodeManagerHostname") for node in nodes]
    for node in nodes:
        name, host = names[node["NodeID"]], node.get("NodeManagerHostname")
        if name == node.get("NodeManagerAddress") and host and hosts.count(host) == 1:
            names[node["NodeID"]] = host
        elif not name or list(names.values()).count(name) > 1:
            names[node["NodeID"]] = f"{host}-{node['NodeID'][:6]}"
    return names


def main() -> None:
    """Connect, list the nodes, ask them."""
    job = json.load(sys.stdin)
    try:
        import ray
    except ImportError:
        say(problem="no ray")
        return
    try:
        ray.init(address=job["address"] or "auto", log_to_driver=False, logging_level="ERROR", namespace="vllmdiag")
    except Exception as error:  # noqa: BLE001  whatever Ray raises, it is why there is no cluster
        say(problem=f"{type(error).__name__}: {error}"[:300])
        return
    names = names_of([node for node in ray.nodes() if node["Alive"]])
    say(nodes=list(names.values()))
    ask(job, names)


def ask(job: dict[str, Any], names: dict[str, str]) -> None:
    """Ask all nodes, so many at a time, and say of each what became of it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(run_there)
    data = ray.put(base64.b64decode(job["stdin"]))
    waiting = list(names)
    running: dict[Any, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < job["at_once"]:
            node = waiting.pop(0)
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            reference = task.options(scheduling_strategy=where).remote(job["command"], data, job["deadline_s"])
            running[reference] = (names[node], time.time())
        ended, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
        now = time.time()
        for reference, (name, since) in list(running.items()):
            if reference in ended:
                say(node=name, asked=since, heard=now, **outcome(ray, reference))
            elif now - since > job["deadline_s"] + SLACK_S:
                say(node=name, asked=since, heard=now)
            else:
                continue
            del running[reference]


def outcome(ray: Any, reference: Any) -> dict[str, Any]:
    """What a task brought back."""
    try:
        code, out, err = ray.get(reference)
    except Exception as error:  # noqa: BLE001  a node that dies under its task raises one of many
        return {"problem": str(error).splitlines()[0][:300]}
    return {"code": code, "stdout": base64.b64encode(out).decode(), "stderr": err.decode(errors="replace")}


if __name__ == "__main__":
    main()

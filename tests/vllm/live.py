"""``python -m tests.vllm.live tp2 --hold``: start a topology, print its pids as JSON, hold it until Ctrl-C.

Without ``--hold`` it ends as soon as the topology has started. Several names (or ``all``) start in turn.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from .server import Server, StartError
from .topologies import TOPOLOGIES


def main() -> int:
    """Start what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.live")
    parser.add_argument("topology", nargs="+", choices=[*TOPOLOGIES, "all"])
    parser.add_argument("--hold", action="store_true", help="keep it running until Ctrl-C or SIGTERM")
    parser.add_argument("--arg", action="append", default=[], help="one more argument of vllm serve")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="one more variable")
    parser.add_argument("--shm-size", help="private /dev/shm of this size, e.g. 64m")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    names = list(TOPOLOGIES) if "all" in given.topology else given.topology
    try:
        return max([_start(name, given) for name in names])
    except KeyboardInterrupt:
        return 0


def _start(name: str, given: argparse.Namespace) -> int:
    env = dict(pair.split("=", 1) for pair in given.env)
    try:
        with Server(name, args=tuple(given.arg), env=env, shm_size=given.shm_size) as server:
            server.wait_ready()
            about = {"topology": name, "port": server.port, "started_in_s": round(server.started_in_s, 1)}
            about |= {"log": str(server.log()), "model": server.model}
            print(json.dumps({**about, **server.pids()}), flush=True)
            if given.hold:
                signal.pause()
    except StartError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

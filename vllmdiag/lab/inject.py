"""Putting a fault in place: one small function a step, each of which returns when what it does has taken effect."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import client, procs, switches
from .faults import Fault
from .server import Lab, Shape

_SETTLED_S = 1.3
"""Readers spin for 1 s after a message; then their stacks are those of a wait."""
_PIDS = Path("/sys/fs/cgroup/pids")


def inject(lab: Lab, fault: Fault) -> None:
    """Carry out the steps of a fault. Raises LabError where one does not take effect."""
    for step in fault.steps:
        arguments = dict(step)
        STEPS[arguments.pop("do")](lab, **arguments)


# --- signals


def _stop(lab: Lab, who: str) -> None:
    pid = lab.pid(who)
    os.kill(pid, signal.SIGSTOP)
    lab.wait_for(f"{who} is stopped", lambda: (p := procs.read(pid)) and p.state == "T")


def _kill(lab: Lab, who: str) -> None:
    lab.note_segments()
    os.kill(lab.pid(who), signal.SIGKILL)
    if who != "APIServer":
        _ended(lab, who)


def _ended(lab: Lab, who: str) -> None:
    if who == "APIServer":
        lab.wait_for("the server has ended", lambda: procs.read(lab.root) is None or lab.reap())
        return

    def alive() -> bool:
        return any(p.title == f"VLLM::{who}" and p.state != "Z" for p in lab.processes().values())

    lab.wait_for(f"{who} has ended", lambda: not alive())


def _kill_all(lab: Lab) -> None:
    lab.note_segments()
    lab.kill_all()


def _leaks(lab: Lab) -> None:
    """Another server is killed, all of it at once: its segments stay."""
    other = Lab(Shape())
    lab.cleanup.callback(other.down)
    other.wait_ready()
    _kill_all(other)


# --- work


def _request(lab: Lab, max_tokens: int = 4, *, counted: bool = True, wait: bool = False, hang_up: bool = False) -> None:
    call = lab.request(max_tokens)
    if wait:
        call.result()
    elif counted:
        lab.wait_for("the server has the request", lambda: not call.running or lab.running() >= 1)
    if hang_up:
        call.cancel()


def _rpc(
    lab: Lab, method: str, args: tuple[Any, ...] = (), timeout: float | None = None, *, wait: bool = False
) -> None:
    call = lab.rpc(method, *args, timeout=timeout)
    if wait:
        call.result()


def _load(lab: Lab, clients: int) -> None:
    for _ in range(clients):
        lab.request(1_000_000)
    before = lab.flags()
    lab.wait_for("the rings move", lambda: lab.flags() != before)


def _deaf_client(lab: Lab) -> None:
    body = json.dumps({"prompt": "lab", "max_tokens": 1_000_000, "stream": True, "repeat": 2000})
    lab.cleanup.callback(client.deaf(lab.port, body).close)


def _unsent(lab: Lab, bytes: int) -> None:
    def queued() -> int:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return max((int(r[4].split(":")[0], 16) for r in rows if int(r[1].split(":")[1], 16) == lab.port), default=0)

    lab.wait_for(f"{bytes} bytes are stuck in the kernel", lambda: queued() >= bytes)


def _connect(lab: Lab, n: int) -> None:
    for _ in range(n):
        lab.cleanup.callback(socket.create_connection(("127.0.0.1", lab.port)).close)


# --- switches and time


def _switch(lab: Lab, name: str, whom: str = "") -> None:
    switches.turn_on(name, whom, lab.work)
    lab.cleanup.callback(lambda: switches.turn_off(name, lab.work))


def _switch_off(lab: Lab, name: str) -> None:
    switches.turn_off(name, lab.work)


def _entered(lab: Lab, name: str) -> None:
    lab.wait_for(f"{name} is entered", lambda: switches.has_been_entered(name, lab.work))


def _settle(lab: Lab) -> None:
    """Wait until no flag of a ring has changed for a while."""
    flags, since = lab.flags(), time.monotonic()

    def still() -> bool:
        nonlocal flags, since
        now = lab.flags()
        if now != flags:
            flags, since = now, time.monotonic()
        return time.monotonic() - since > _SETTLED_S

    lab.wait_for("nothing moves any more", still, 60.0)


def _grown(lab: Lab, to: str) -> None:
    """Wait until a process of that role has come."""
    lab.wait_for(f"there is a {to}", lambda: any(p.title.startswith(f"VLLM::{to}") for p in lab.processes().values()))


def _age(lab: Lab, seconds: float) -> None:
    """Wait until the youngest process of the server, which should be ready long since, is that old."""

    def old_enough() -> bool:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return all(now - p.started_s > seconds for p in lab.processes().values())

    lab.wait_for("it is old enough", old_enough, seconds + 30)


# --- files, memory, limits


def _remove_sockets(lab: Lab) -> None:
    for path in (lab.work / "ipc").iterdir():
        if path.is_socket():
            path.unlink()


def _unlink_segments(lab: Lab) -> None:
    for name in lab.note_segments():
        (Path("/dev/shm") / name).unlink()


def _shrink_shm(lab: Lab, to: str) -> None:
    remount = ["mount", "-o", f"remount,size={to}", "/dev/shm"]
    subprocess.run(["nsenter", "--target", str(lab.root), "--mount", *remount], check=True)


def _fill_shm(lab: Lab) -> None:
    with Path(f"/proc/{lab.root}/root/dev/shm/filler").open("wb", buffering=0) as file:
        room = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)


def _limit_files(lab: Lab, spare: int) -> None:
    used = len(os.listdir(f"/proc/{lab.root}/fd"))
    resource.prlimit(lab.root, resource.RLIMIT_NOFILE, (used + spare, used + spare))


def _limit_pids(lab: Lab) -> None:
    cgroup = _PIDS / lab.work.name
    cgroup.mkdir()
    home = _PIDS / "cgroup.procs"

    def undo() -> None:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with suppress(OSError):
                home.write_text(pid)
        cgroup.rmdir()

    lab.cleanup.callback(undo)
    for pid in lab.processes():
        (cgroup / "cgroup.procs").write_text(str(pid))
    (cgroup / "pids.max").write_text((cgroup / "pids.current").read_text())


_LISTENER = """
import socket, sys, time
made = socket.socket()
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
made.bind(("127.0.0.1", int(sys.argv[1])))
made.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def _foreign_listener(lab: Lab) -> None:
    """Another program on the port. It ends when its input is closed, so with the lab too."""
    other = subprocess.Popen(
        [sys.executable, "-c", _LISTENER, str(lab.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    lab.cleanup.callback(lambda: _end(other))
    assert other.stdout is not None
    other.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


STEPS: dict[str, Callable[..., None]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and getattr(function, "__module__", "") == __name__
}
"""Every step by its name in faults.json."""

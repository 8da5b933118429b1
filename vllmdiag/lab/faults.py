"""The faults as data: what each does, and what `diagnose` must say to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.errors import UsageError

from .server import Shape


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, or one healthy state that must give no alarm."""

    name: str
    does: str
    cause: str
    """Slug of the catalogue."""
    layer: int
    subject: str
    """Label of the subject; ``*`` stands for what differs from run to run."""
    chain: tuple[str, ...] = ()
    """Labels from the client to the root; empty where the lab does not ask for a chain."""
    finding: str = ""
    """Cause of a finding that must be there beside the verdict."""
    shape: dict[str, Any] = {}
    """Fields of `Shape` that differ from its defaults."""
    ready: bool = True
    """The steps begin when the server answers; else while it starts."""
    steps: tuple[dict[str, Any], ...] = ()
    """What is done, in order: functions of `vllmdiag.lab.inject` with their arguments."""
    healthy: bool = False
    slow: bool = False
    """It takes more than half a minute to be sure."""
    needs: tuple[str, ...] = ()
    """What this machine must offer: see `lacking`."""

    def start(self) -> Shape:
        """What server it takes."""
        given = dict(self.shape)
        for name in ("env", "switches"):
            given[name] = tuple(given.get(name, {}).items())
        return Shape(**given)

    @property
    def expected(self) -> str:
        """In one line: cause, layer, subject."""
        return f"{self.cause} · {self.layer} · {self.subject}"

    def lacking(self) -> str:
        """What this machine lacks for it; empty when it can run."""
        missing = [_NEEDS[need][0] for need in self.needs if not _NEEDS[need][1]()]
        return ", ".join(missing)

    def misses(self, diagnosis: Diagnosis) -> tuple[str, ...]:
        """In what a diagnosis is not the expected one."""
        verdict = diagnosis.verdict
        found = []
        if verdict.cause != self.cause:
            found.append(f"cause {verdict.cause}, expected {self.cause}")
        if verdict.layer != self.layer:
            found.append(f"layer {verdict.layer}, expected {self.layer}")
        if not fnmatchcase(verdict.subject.label, self.subject):
            found.append(f"subject {verdict.subject.label}, expected {self.subject}")
        chain = [link.subject.label for link in verdict.chain]
        fits = len(chain) == len(self.chain) and all(map(fnmatchcase, chain, self.chain))
        if self.chain and not fits:
            found.append(f"chain {' -> '.join(chain)}, expected {' -> '.join(self.chain)}")
        if self.finding and self.finding not in {finding.cause for finding in diagnosis.findings}:
            found.append(f"no finding {self.finding}")
        return tuple(found)


@cache
def faults() -> Mapping[str, Fault]:
    """Every fault by name, the healthy states first."""
    text = (files("vllmdiag.lab") / "faults.json").read_bytes()
    return {fault.name: fault for fault in msgspec.json.decode(text, type=tuple[Fault, ...])}


def named(name: str) -> Fault:
    """The fault of that name. Raises UsageError where there is none."""
    found = faults().get(name)
    if found is None:
        raise UsageError(f"no fault {name!r}", why=f"there are {', '.join(faults())}", next="vllmdiag lab faults")
    return found


def _alone() -> bool:
    from vllmdiag.sources.target import running

    return not running()[1]


def _sees_holders() -> bool:
    from vllmdiag.sources import shm

    here = os.stat("/dev/shm")
    return shm.all_holders({(here.st_dev, here.st_ino)}).complete


_NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "root": ("root, for a /dev/shm of its own or a limit", lambda: os.geteuid() == 0),
    "cgroup": (
        "a cgroup with the pids controller that may be changed",
        lambda: os.access("/sys/fs/cgroup/pids", os.W_OK),
    ),
    "holders": ("to see what every process holds, the first one included", _sees_holders),
    "alone": ("a machine on which no other vLLM runs", _alone),
}
"""Need -> (in words, whether this machine has it)."""

"""What a pipeline expects of a server (``tp=2,ready,ring=moving``), compared with what was found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllmdiag.model.check import Expectation
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.view import InstanceView

UNSEEN = "not known"


class _Seen(NamedTuple):
    view: InstanceView
    diagnosis: Diagnosis

    def members(self, *roles: str) -> str:
        """Members of a role."""
        return str(sum(m.role in roles and m.pid is not None for m in self.view.members))

    def ranks(self, kind: str) -> str:
        """How many ranks of a kind there are on this machine: 1 where no member carries one."""
        return str(len({m.ranks[kind] for m in self.view.members if kind in m.ranks}) or 1)


def _ready(seen: _Seen) -> str:
    if seen.diagnosis.verdict.cause == "starting":
        return "starting"
    health, verdict = _health(seen), seen.diagnosis.verdict
    if verdict.status in ("critical", "unknown"):
        return f"/health {health}, {verdict.cause}"
    return "ready" if health == "200" else f"/health {health}"


def _health(seen: _Seen) -> str:
    probes = [p for c in seen.view.clients for p in c.probes if p.path == "/health"]
    if not probes:
        return UNSEEN
    return str(probes[0].status) if probes[0].status is not None else probes[0].error


def _metrics(seen: _Seen) -> str:
    return "served" if any(c.counters for c in seen.view.clients) else UNSEEN


def _ring(seen: _Seen) -> str:
    motions = dict.fromkeys(r.motion for r in seen.view.rings if r.queue == "broadcast ring")
    return ",".join(motions) or "none"


_FLAGS: dict[str, tuple[str, Callable[[_Seen], str]]] = {
    "ready": ("ready", _ready),
    "health": ("200", _health),
    "metrics": ("served", _metrics),
}
"""Expected by name alone: what it means, and how it is found."""
_VALUES: dict[str, Callable[[_Seen], str]] = {
    "tp": lambda seen: seen.ranks("tp"),
    "pp": lambda seen: seen.ranks("pp"),
    "ep": lambda seen: seen.ranks("ep"),
    "dp": lambda seen: seen.members("EngineCore"),
    "workers": lambda seen: seen.members("Worker", "RayWorker"),
    "api-servers": lambda seen: seen.members("APIServer"),
    "ring": _ring,
    "version": lambda seen: seen.view.vllm_version or UNSEEN,
    "model": lambda seen: seen.view.model or UNSEEN,
    "port": lambda seen: str(seen.view.port or UNSEEN),
    "cause": lambda seen: seen.diagnosis.verdict.cause,
}
"""Expected with a value."""
WORDS = (*_FLAGS, *(f"{name}=..." for name in _VALUES))
"""Everything that can be expected, for the help."""


def parse(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """``["tp=2,ready"]`` as pairs of a name and what is wanted.

    Raises:
        ValueError: a name that is none, or one that lacks its value, in words.
    """
    wanted = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        name, equals, value = word.partition("=")
        if name in _FLAGS and not equals:
            wanted.append((name, _FLAGS[name][0]))
        elif name in _VALUES and value:
            wanted.append((name, value))
        else:
            raise ValueError(_wrong(name))
    return tuple(wanted)


def _wrong(name: str) -> str:
    if name in _FLAGS:
        return f"{name} takes no value"
    return f"{name} needs a value" if name in _VALUES else f"nothing is called {name!r}"


def compare(wanted: Iterable[tuple[str, str]], view: InstanceView, diagnosis: Diagnosis) -> tuple[Expectation, ...]:
    """Each expectation with what was found."""
    seen = _Seen(view, diagnosis)
    result = []
    for name, value in wanted:
        found = _FLAGS[name][1](seen) if name in _FLAGS else _VALUES[name](seen)
        result.append(Expectation(name=name, wanted=value, found=found, met=found == value))
    return tuple(result)

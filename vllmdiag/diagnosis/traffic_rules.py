"""Layer 5: what lies between client and server: proxies that hold back or catch, and clients that give up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from vllmdiag.model.diagnosis import Confidence, Finding, Link, Severity, Subject
from vllmdiag.model.http import ClientView, HttpProbe
from vllmdiag.model.logs import LogAbort
from vllmdiag.model.snapshot import Snapshot

from . import write
from .logs import pid_words

_LATE_S = 5.0
"""A first byte that comes later than this, while tokens are made all the time, was held back."""
_BURST_GAP_S = 1.5
_BURST_CHUNKS = 8.0
_FEW = 3
_LONG_S = 15.0
"""Requests that are aborted younger than this were cancelled by somebody, not timed out."""
_SPREAD = 0.03
_SPREAD_S = 2.0
_MOST = 0.6
_TOKENS = "generation_tokens_total"
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_REFUSED = re.compile(r"\b50[234]\b.*(?://|\bhost=')(?:127\.|localhost|\[::1\])")
_DIRECT = re.compile(r"\bdirect|\bstraight|\bto the pod\b", re.IGNORECASE)
_SLOWER, _SLOWER_S = 5.0, 0.1
"""The first token comes this many times, and this many seconds, later than it does without the proxy."""


def traffic_findings(snapshot: Snapshot, *, well: bool, target: int | None) -> Iterator[Finding]:
    """All of them.

    Args:
        snapshot: with or without processes of vLLM.
        well: the engine was seen and does its work: then what a log says of the past is only told.
        target: a pid of the instance, for the next steps.
    """
    words = {"target": str(target)} if target is not None else {}
    yield from _buffered(snapshot, words)
    yield from _intercepted(snapshot, words)
    yield from _caught(snapshot, words)
    yield from _timed_out(snapshot, words, "info" if well else None)


def _tokens_moved(snapshot: Snapshot) -> str:
    by_port: dict[int, list[float]] = {}
    for scrape in snapshot.metrics:
        if _TOKENS in scrape.values:
            by_port.setdefault(scrape.port, []).append(sum(scrape.values[_TOKENS].values()))
    for values in by_port.values():
        if len(values) >= 2 and values[-1] > values[0]:
            return f"{_TOKENS} {values[0]:g} -> {values[-1]:g}"
    return ""


def _late(view: ClientView, usual: float | None) -> bool:
    if usual is not None and (view.first_byte_s or 0.0) >= max(usual * _SLOWER, usual + _SLOWER_S):
        return True
    bursts = (view.burst_gap_s or 0.0) >= _BURST_GAP_S and (view.burst_chunks or 0.0) >= _BURST_CHUNKS
    return bursts or (view.first_byte_s or 0.0) >= _LATE_S


def _buffered(snapshot: Snapshot, words: dict[str, str]) -> Iterator[Finding]:
    """The server makes tokens and its peer takes them, and the client gets them late and in lumps."""
    straight = [v.first_byte_s for v in snapshot.client_views if v.first_byte_s and _DIRECT.search(v.text)]
    usual = min(straight, default=None)
    late = [view for view in snapshot.client_views if _late(view, usual) and not _DIRECT.match(view.text)]
    moved = _tokens_moved(snapshot)
    peers = [s for s in snapshot.sockets if s.family != "unix" and s.state == "ESTAB" and s.remote and s.pids]
    held = [s for s in peers if (s.send_q or 0) > 0]
    if not late or not moved or held:
        return
    peer = peers[0] if peers else None
    who = Subject(role="Client", label=f"proxy {peer.remote.rpartition(':')[0]}" if peer is not None else "proxy")
    name = who.label if peer is not None else "whatever stands between it and the client"
    yield write.finding(
        "proxy-buffering",
        who,
        f"tokens are made and {name} takes them at once: they are held back behind it",
        evidence=[
            moved,
            *(f"{s.local} -> {s.remote}: Send-Q 0" for s in peers[:3]),
            *(f"client: {v.text or f'first byte after {v.first_byte_s:g} s'}" for v in late[:2]),
        ],
        chain=(Link(subject=who, doing="holds the answer back"),),
        confidence="high" if peer is not None else "medium",
        words=words,
    )


def _fine(probe: HttpProbe) -> bool:
    return probe.status is not None and probe.status < 400


def _intercepted(snapshot: Snapshot, words: dict[str, str]) -> Iterator[Finding]:
    """A probe went to a proxy and failed there; asked directly, the server answers."""
    caught = [p for p in snapshot.http if p.proxy and not _fine(p)]
    direct = [p for p in snapshot.http if not p.proxy and _fine(p)]
    if not caught:
        return
    probe = caught[0]
    who = Subject(role="Client", label="the prober")
    answer = f"answers {probe.status}" if probe.status is not None else f"gives no answer ({probe.error})"
    yield write.finding(
        "proxy-env",
        who,
        f"the probe of {probe.path} goes through the proxy {probe.proxy}, which {answer}: it never reaches the server",
        evidence=[
            f"GET {probe.path} by way of {probe.proxy}: {answer}",
            *(f"GET {p.path} straight: {p.status}" for p in direct[:2]),
        ],
        chain=(Link(subject=who, doing="asks the proxy"),),
        confidence="high" if direct else "medium",
        words={**words, "port": str(next((p.port for p in (*direct, probe) if p.port), 8000))},
    )


def _caught(snapshot: Snapshot, words: dict[str, str]) -> Iterator[Finding]:
    """Whoever probes has a proxy in its environment, fails, and the same path answers when it is asked straight."""
    direct = [p for p in snapshot.http if not p.proxy and _fine(p)]
    paths = {(p.t, p.path) for p in direct}
    failed = [p for p in snapshot.http if not p.proxy and not _fine(p) and (p.t, p.path) in paths]
    said = [e.text for d in snapshot.logs for e in (d.first_error, *d.other_errors) if e and _REFUSED.search(e.text)]
    prober = next((p for p in snapshot.processes if any(map(p.environ.get, _PROXIES))), None)
    if prober is None or not direct or not (failed or said):
        return
    past = prober.environ.get("NO_PROXY") or prober.environ.get("no_proxy") or ""
    if any(name in past for name in ("localhost", "127.", "*")):
        return
    variable = next(name for name in _PROXIES if prober.environ.get(name))
    who = Subject(role="Client", label="the prober")
    answer = f"is answered {failed[0].status}" if failed and failed[0].status else "fails"
    yield write.finding(
        "proxy-env",
        who,
        f"the probe of {direct[0].path} {answer}, and asked straight the server answers {direct[0].status}:"
        f" {variable} is set for whoever probes, and nothing exempts the loopback address",
        evidence=[
            f"{variable} is set for {pid_words(prober.pid)}, NO_PROXY is {past or 'not set'}",
            *(f"GET {p.path}: {p.status or p.error}" for p in failed[:2]),
            *(f"log: {text}" for text in said[:2]),
            f"GET {direct[0].path} straight: {direct[0].status}",
        ],
        chain=(Link(subject=who, doing="asks the proxy"),),
        confidence="medium",
        words={**words, "port": str(direct[0].port or 8000)},
    )


def _timed_out(snapshot: Snapshot, words: dict[str, str], severity: Severity | None) -> Iterator[Finding]:
    aborts = [a for d in snapshot.logs for a in d.aborts]
    cluster = _cluster(aborts)
    if not cluster:
        return
    age = median(a.age_s for a in cluster)
    again = [a for a in cluster if a.again_s is not None]
    who = Subject(role="Client", label="the client, or a proxy before it")
    loop = len(again) >= _MOST * len(cluster)
    sure: Confidence = "high" if len(cluster) >= 2 * _FEW else "medium"
    evidence = [
        f"{len(cluster)} of {len(aborts)} aborted requests were {age:.0f} s old ({_spread(cluster)})",
        *([f"{len(again)} of them came again within {max(a.again_s or 0 for a in again):.0f} s"] if again else []),
    ]
    if loop:
        summary = f"requests are aborted at an age of {age:.0f} s and come again: a client times out and retries"
    else:
        summary = f"requests are aborted at an age of {age:.0f} s: a time-out of the client or of a proxy, not of vLLM"
    yield write.finding(
        "client-retry-loop" if loop else "client-abort-silent",
        who,
        summary,
        evidence=evidence,
        chain=(Link(subject=who, doing=f"gives up after {age:.0f} s"),),
        confidence=sure,
        severity=severity,
        words=words,
    )


def _cluster(aborts: Sequence[LogAbort]) -> list[LogAbort]:
    """Aborts of one age; empty where the ages are as different as those of people who change their mind."""
    old = [a for a in aborts if a.age_s >= _LONG_S]
    if len(old) < _FEW:
        return []
    best: list[LogAbort] = []
    for one in old:
        near = [a for a in old if abs(a.age_s - one.age_s) <= max(_SPREAD_S, _SPREAD * one.age_s)]
        best = max(best, near, key=len)
    return best if len(best) >= max(_FEW, _MOST * len(old)) else []


def _spread(cluster: Sequence[LogAbort]) -> str:
    ages = [a.age_s for a in cluster]
    return f"{min(ages):.0f} to {max(ages):.0f} s"

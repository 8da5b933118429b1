"""What a stack means: known functions of vLLM, torch, NCCL, CUDA and Python, and what a process waits for in each.

A pattern of the table is ``function @ file`` or ``function @ file < caller @ file``, each part a regular expression;
without an @ it is looked for in the whole frame (native symbols, kernel functions). The caller is the next frame
outside, with decorators and context managers passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal

import msgspec

from vllmdiag.model.process import Frame

from .tables import load

Kind = Literal[
    "idle",
    "wait_response",
    "wait_readers",
    "wait_start",
    "collective",
    "gpu_wait",
    "busy",
    "loading",
    "compiling",
    "lock",
    "import",
    "io_thread",
    "context",
    "download",
]


class Signature(msgspec.Struct, frozen=True):
    """One known state of a thread."""

    id: str
    kind: Kind
    """``context`` is never decisive."""
    meaning: str
    waits_for: str
    source: tuple[str, ...]
    """Files of vLLM (or CPython), recordings, public issues."""
    any: tuple[str, ...]
    """Patterns, one of which a frame must fit."""
    all: tuple[str, ...] = ()
    """Patterns each of which some frame of the stack must fit."""
    roles: tuple[str, ...] = ()
    """Roles it is looked for in; empty means every one."""
    refines: tuple[str, ...] = ()
    """Ids of inner states that this one explains better."""
    top: bool = False
    """No Python frame may stand inside the one that fits."""
    expect: str = ""
    """State of the thread (R, S, D) and what it sleeps in, when all is as described."""
    note: str = ""
    since: str | None = None
    until: str | None = None


class Match(msgspec.Struct, frozen=True):
    """A signature found in a stack."""

    signature: Signature
    depth: int
    """Index of the innermost frame that fits; 0 is the innermost of the stack."""


class _Pattern(msgspec.Struct, frozen=True):
    frame: re.Pattern[str]
    caller: re.Pattern[str] | None


_SAME_AS = {"RayWorker": "Worker", "Launcher": "APIServer"}
_ANY_ROLE = {"", "Child", "Driver", "Helper"}
"""Roles of which it is not known what they run: every signature is tried."""

_GLUE = re.compile(r" \(\S*(?:contextlib|_contextlib|c10d_logger|otel|functools)\.py")
_BOOTSTRAP = re.compile(r"(?:^|\.)_bootstrap \(\S*multiprocessing/process\.py")


@cache
def signatures() -> tuple[Signature, ...]:
    """The whole table."""
    return load("signatures", tuple[Signature, ...])


def match(frames: Sequence[Frame], role: str = "") -> tuple[Match, ...]:
    """Everything known that a stack shows, innermost first.

    Args:
        frames: innermost first, as in `ThreadStack.frames`. Kernel functions (wchan, /proc/PID/stack) may be given as
            frames with an empty file.
        role: ``EngineCore``, ``Worker``...; empty where unknown.

    Frames outside ``BaseProcess._bootstrap`` are left out: in a forked process they are the stack of the parent at the
    time of the fork.
    """
    role = _SAME_AS.get(role, role)
    texts = _own(frames)
    found: dict[str, Match] = {}
    for depth, text in enumerate(texts):
        for number, pattern in _hits(text):
            signature = signatures()[number]
            if signature.id in found or not plays(role, signature.roles):
                continue
            if pattern.caller is not None and not pattern.caller.search(_caller(texts, depth)):
                continue
            if signature.top and any(_is_python(inner) for inner in texts[:depth]):
                continue
            if all(any(rule.frame.search(other) for other in texts) for rule in _all_of(number)):
                found[signature.id] = Match(signature, depth)
    return tuple(found.values())


def state_of(frames: Sequence[Frame], role: str = "") -> Match | None:
    """The one signature that says what the thread does: the innermost that is not mere context.

    An inner state gives way to an outer one that refines it: to wait for the writer of a queue is to be idle when the
    worker's main loop does it, and to wait for an answer when an RPC does.
    """
    decisive: Match | None = None
    for found in match(frames, role):
        if found.signature.kind == "context":
            continue
        if decisive is None or decisive.signature.id in found.signature.refines:
            decisive = found
    return decisive


def _own(frames: Sequence[Frame]) -> list[str]:
    texts = []
    for frame in frames:
        text = f"{frame.name} ({frame.file}"
        texts.append(text)
        if _BOOTSTRAP.search(text):
            break
    return texts


def plays(role: str, roles: Sequence[str]) -> bool:
    """A process of this role may be in what is looked for in `roles` only (none: in every one)."""
    role = _SAME_AS.get(role, role)
    return not roles or role in _ANY_ROLE or role in roles


def depth_of(frames: Sequence[Frame], patterns: Sequence[str]) -> int | None:
    """Index of the innermost frame that fits one of the patterns (as in `Signature.any`); None where none does."""
    texts = _own(frames)
    rules = [_compiled(pattern) for pattern in patterns]
    for depth, text in enumerate(texts):
        for rule in rules:
            if rule.frame.search(text) and (rule.caller is None or rule.caller.search(_caller(texts, depth))):
                return depth
    return None


def _caller(texts: Sequence[str], depth: int) -> str:
    return next((text for text in texts[depth + 1 :] if not _GLUE.search(text)), "")


def _is_python(text: str) -> bool:
    return text.endswith((".py", ">")) and not _GLUE.search(text)


@lru_cache(maxsize=8192)
def _hits(text: str) -> tuple[tuple[int, _Pattern], ...]:
    """(number of the signature, pattern) of every pattern that a frame fits; kept, as stacks repeat their frames."""
    return tuple((number, pattern) for number, pattern in _patterns() if pattern.frame.search(text))


@cache
def _patterns() -> tuple[tuple[int, _Pattern], ...]:
    return tuple((number, _compile(rule)) for number, signature in enumerate(signatures()) for rule in signature.any)


@cache
def _all_of(number: int) -> tuple[_Pattern, ...]:
    return tuple(_compile(rule) for rule in signatures()[number].all)


@cache
def _compiled(rule: str) -> _Pattern:
    return _compile(rule)


def _compile(rule: str) -> _Pattern:
    frame, _, caller = rule.partition(" < ")
    return _Pattern(_frame(frame), _frame(caller) if caller else None)


def _frame(rule: str) -> re.Pattern[str]:
    function, at, file = rule.partition(" @ ")
    # py-spy gives qualified names on Python 3.11 and later, and cannot shorten the path of a source checkout.
    return re.compile(rf"(?:^|[\s.])(?:{function}) \((?:\S*/)?(?:{file})" if at else function)

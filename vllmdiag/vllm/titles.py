"""Who a process is, from its command line or title (or, where that is gone, its comm). Pure: strings in, identity out.

vLLM titles its processes ``PREFIX::Name[_RANKS]`` since 0.10.1 (setproctitle); a lone API server keeps its plain
command line, and so does everything before its title is set, so the argv is read as well. A command that only mentions
vLLM (a shell, grep, py-spy) is nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import msgspec

from vllmdiag.model.base import Fact
from vllmdiag.model.process import Frame

from .serve_options import ServeOptions, parse_options
from .tables import load

__all__ = [
    "Identity",
    "Role",
    "ServeOptions",
    "from_label",
    "from_title",
    "identify",
    "is_ray_worker",
    "is_supervisor",
    "role_of_main",
]

Role = Literal[
    "APIServer", "EngineCore", "Worker", "DPCoordinator", "ResourceTracker", "RayWorker", "Launcher", "Child"
]
KnownBy = Literal["title", "command line", "comm", "label", "evidence"]

COMM_LENGTH = 15
"""The kernel keeps 15 characters of a name."""


class Identity(Fact, frozen=True, kw_only=True):
    """What a process calls itself."""

    role: Role
    ranks: dict[str, int] = msgspec.field(default_factory=dict)
    """``tp``, ``pp``, ``dp``, ``ep``, ``dcp``, ``pcp``; ``index`` for a number without a kind (APIServer_1)."""
    name: str
    """The label people see: ``Worker_TP1``."""
    prefix: str = ""
    """VLLM_PROCESS_NAME_PREFIX, ``VLLM`` unless set; empty where the process has no title."""
    known_by: KnownBy
    starting: bool = False
    """An untitled child of multiprocessing: which role it will have is not yet to be seen."""
    headless: bool = False
    options: ServeOptions | None = None


class _Named(msgspec.Struct, frozen=True):
    name: str
    source: str
    role: Role | None = None
    verb: str | None = None
    since: str | None = None
    until: str | None = None


class _Option(msgspec.Struct, frozen=True):
    field: str
    names: tuple[str, ...]


class _Tables(msgspec.Struct, frozen=True):
    titles: tuple[_Named, ...]
    labels: tuple[_Named, ...]
    ray: tuple[_Named, ...]
    serve_modules: tuple[_Named, ...]
    serve_programs: tuple[_Named, ...]
    code: tuple[_Named, ...]
    mains: tuple[_Named, ...]
    supervisors: tuple[_Named, ...]
    options: tuple[_Option, ...]


@cache
def _tables() -> _Tables:
    return load("titles", _Tables)


@cache
def _options() -> Mapping[str, str]:
    return {name: option.field for option in _tables().options for name in option.names}


_PYTHON = re.compile(r"(python|pypy)[\d.]*t?", re.IGNORECASE)
_RANK = re.compile(r"_(?P<kind>[A-Z]+)?(?P<number>\d+)")
_LABEL_RANK = re.compile(r"(?:[_-]| rank=)(?P<number>\d+)")


def identify(cmdline: Sequence[str], comm: str = "") -> Identity | None:
    """Who a process is.

    Args:
        cmdline: /proc/PID/cmdline split at NUL, or the line that `ps` printed as one element; empty where missing.
        comm: /proc/PID/comm, at most 15 characters; used only where the command line is empty (a zombie has none).

    Returns:
        None for a process that is not a part of vLLM as far as its words go. An offline script is one of those.
    """
    words = [word.strip("\0 \n") for word in cmdline]
    words = [word for word in words if word]
    if not words:
        return _from_comm(comm.strip())
    if len(words) == 1:
        if titled := from_title(words[0]):
            return titled
        words = words[0].split() or words  # a lone separator such as \x1f is all that may be there
    return _from_ray(words[0]) or _from_argv(words)


def from_title(title: str) -> Identity | None:
    """Read a whole title such as ``VLLM::Worker_TP1_EP1``; None where it is none. The prefix may be any word."""
    prefix, colons, name = title.partition("::")
    if not colons or not prefix or re.search(r"[\s/]", title):
        return None
    return _named(name, prefix, "title")


def told(role: str) -> Identity | None:
    """Who a process is that other evidence names by its role; None for a role that a title may not tell either."""
    known = next((entry.role for entry in _tables().titles if entry.role == role), None)
    return Identity(role=known, name=role, known_by="evidence") if known is not None else None


def role_of_main(frames: Sequence[Frame]) -> str:
    """The role of a process by the stack of its main thread, innermost frame first; empty where that tells none.

    A child of fork keeps the frames of its parent below its own, so the innermost main function is its own.
    """
    for frame in frames:
        for entry in _tables().mains:
            name, _, file = entry.name.partition(" @ ")
            if frame.name.rpartition(".")[2] == name and frame.file.endswith(file):
                return entry.role or ""
    return ""


def is_supervisor(cmdline: Sequence[str]) -> bool:
    """Whether a Python program is one that starts others and uses no model itself."""
    words = cmdline if len(cmdline) > 1 else " ".join(cmdline).split()
    return any(_base(word) == entry.name for word in words[:3] for entry in _tables().supervisors)


def is_ray_worker(actor: str) -> bool:
    """Whether an actor of that class is a worker of vLLM (``RayWorkerWrapper``)."""
    return any(entry.name == actor and entry.role == "RayWorker" for entry in _tables().ray)


def from_label(label: str) -> Identity | None:
    """Read the name a log line begins with: ``Worker_TP1``, ``EngineCore_DP0``, ``VllmWorker rank=1``."""
    label = label.strip().strip("()")
    label = re.sub(r"\s+pid=\d+$", "", label)
    if identity := _named(label, "", "label"):
        return identity
    for entry in _tables().labels:
        if entry.role is None or not label.startswith(entry.name):
            continue
        rest = label[len(entry.name) :]
        rank = _LABEL_RANK.fullmatch(rest)
        if not rest or rank:
            ranks = {"index": int(rank["number"])} if rank else {}
            return Identity(role=entry.role, ranks=ranks, name=label, known_by="label")
    return None


def _named(name: str, prefix: str, known_by: KnownBy) -> Identity | None:
    for entry in _tables().titles:
        if entry.role is None or not name.startswith(entry.name):
            continue
        ranks = _ranks(name[len(entry.name) :])
        if ranks is not None:
            return Identity(role=entry.role, ranks=ranks, name=name, prefix=prefix, known_by=known_by)
    return None


def _ranks(suffix: str) -> dict[str, int] | None:
    """``_DP0_TP1`` as ``{"dp": 0, "tp": 1}``, in any order; None where the suffix is something else."""
    ranks = {}
    at = 0
    while at < len(suffix):
        found = _RANK.match(suffix, at)
        if found is None:
            return None
        ranks[(found["kind"] or "index").lower()] = int(found["number"])
        at = found.end()
    return ranks


def _from_comm(comm: str) -> Identity | None:
    if comm in {program.name for program in _tables().serve_programs}:
        return Identity(role="APIServer", name="APIServer", known_by="comm")
    prefix, colons, name = comm.partition("::")
    if not colons or not prefix or not name:
        return None
    cut = len(comm) >= COMM_LENGTH
    for entry in _tables().titles:
        if entry.role is None:
            continue
        if cut and entry.name.startswith(name):
            return Identity(role=entry.role, name=entry.name, prefix=prefix, known_by="comm")
        if name.startswith(entry.name):
            suffix = name[len(entry.name) :]
            # The last number of a cut name may have lost digits (TP1 of TP12), so it is dropped with its kind.
            ranks = _ranks(suffix.rpartition("_")[0] if cut else suffix)
            if ranks is not None:
                label = entry.name + "".join(f"_{kind.upper()}{number}" for kind, number in ranks.items())
                return Identity(role=entry.role, ranks=ranks, name=label, prefix=prefix, known_by="comm")
    return None


def _from_ray(word: str) -> Identity | None:
    if not word.startswith("ray::"):
        return None
    actor = word.removeprefix("ray::").partition(".")[0]
    for entry in _tables().ray:
        if entry.role is not None and entry.name == actor:
            return Identity(role=entry.role, name=actor, prefix="ray", known_by="title")
    return None


def _from_argv(argv: Sequence[str]) -> Identity | None:
    program, rest = argv[0], argv[1:]
    if not _PYTHON.fullmatch(_base(program)):
        return _served(_script(program, rest))
    at = 0
    while at < len(rest) and rest[at].startswith("-"):
        option = rest[at]
        if option == "-m":
            return _served(_module(rest[at + 1 :]))
        if option == "-c":
            return _from_code(" ".join(rest[at + 1 :]))
        at += 2 if option in ("-X", "-W") else 1
    if at == len(rest):
        return None
    return _served(_script(rest[at], rest[at + 1 :]))


def _from_code(code: str) -> Identity | None:
    for entry in _tables().code:
        if entry.role is not None and code.startswith(entry.name):
            return Identity(role=entry.role, name=entry.role, known_by="command line", starting=entry.role == "Child")
    return None


def _script(program: str, rest: Sequence[str]) -> Sequence[str] | None:
    """The arguments of the server that `program` starts; None where it starts none."""
    for entry in _tables().serve_programs:
        if _base(program) == entry.name:
            return rest[1:] if rest[:1] == [entry.verb] else None
    for entry in _tables().serve_modules:
        if entry.verb is None and program.endswith(entry.name.replace(".", "/") + ".py"):
            return rest
    return None


def _module(words: Sequence[str]) -> Sequence[str] | None:
    for entry in _tables().serve_modules:
        if words[:1] == [entry.name]:
            if entry.verb is None:
                return words[1:]
            return words[2:] if words[1:2] == [entry.verb] else None
    return None


def _served(arguments: Sequence[str] | None) -> Identity | None:
    if arguments is None:
        return None
    options = parse_options(arguments, _options())
    return Identity(
        role="APIServer", name="APIServer", known_by="command line", headless=options.headless, options=options
    )


def _base(path: str) -> str:
    return path.rpartition("/")[2]

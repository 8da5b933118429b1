"""What command lines and environments give away by the names of their options and variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.process import Process
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.settings import settings
from vllmdiag.vllm.titles import identify

from .redact_shapes import PROMPT, SECRET_NAME, Shapes
from .redact_tokens import Tokens

_HOST_VARIABLES = {
    *("MASTER_ADDR", "VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_DP_MASTER_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    *("NCCL_RAS_ADDR", "NCCL_COMM_ID", "HOSTNAME", "KUBERNETES_SERVICE_HOST"),
}
_PORT = re.compile(r":\d+$")
_HOST_OPTIONS = {"host", "master-addr", "data-parallel-address", "node-ip-address", "head-node-ip"}
_TEXT_OPTIONS = {"chat-template", "prompt", "system-prompt"}
_LENGTH_MATTERS = {"TMPDIR", "VLLM_RPC_BASE_PATH"}
"""Sockets are made below them, and a path that is too long is a fault: what stands for one must be as long."""


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """Values that are known by the name before them."""

    hosts: frozenset[str] = frozenset()
    homes: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()


def environ_values(environ: Mapping[str, str]) -> Named:
    """What an environment names."""
    homes = {environ["HOME"].rstrip("/")} if "HOME" in environ else set()
    return Named(
        hosts=frozenset(_PORT.sub("", value) for name, value in environ.items() if name in _HOST_VARIABLES),
        homes=frozenset(home for home in homes if home.startswith("/") and home not in {"/root", "/tmp"}),
        secrets=frozenset(v for name, v in environ.items() if _is_secret(name)),
    )


def redacted_environ(
    environ: Mapping[str, str], tokens: Tokens, shapes: Shapes, path: Callable[[str], str]
) -> dict[str, str]:
    """The environment redacted: `path` does what a value needs whose name says nothing."""
    new = {}
    for name, value in environ.items():
        if _is_secret(name):
            new[name] = tokens.secret(value)
        elif name in _HOST_VARIABLES:
            new[name] = shapes.host(value)
        else:
            new[name] = _as_long(path(value), value) if name in _LENGTH_MATTERS else path(value)
    return new


def argv_values(cmdline: Sequence[str] | Missing) -> Named:
    """What a command line names; one that is a single line (a title, or what `ps` printed) is left to the shapes."""
    if isinstance(cmdline, Missing):
        return Named()
    found = list(_options(cmdline))
    return Named(
        hosts=frozenset(_PORT.sub("", value) for option, value in found if option in _HOST_OPTIONS),
        secrets=frozenset(v for option, v in found if _is_secret(option)),
    )


def redacted_argv(cmdline: Sequence[str], tokens: Tokens, shapes: Shapes) -> Iterator[str]:
    """The words with the values of secret options and hosts replaced; the rest is left to the caller."""
    option = ""
    for word in cmdline:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            option = _plain(name)
            yield f"{name}={_replaced(option, value, tokens, shapes)}" if equals else word
            if equals:
                option = ""
        else:
            yield _replaced(option, word, tokens, shapes)
            option = option if _is_secret(option) else ""  # --api-key takes several


def without_bystanders(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the commands of processes that are no part of a vLLM cut down to the program."""
    if not snapshot.target_pids:
        return snapshot
    mine = set(snapshot.target_pids)
    return msgspec.structs.replace(
        snapshot, processes=tuple(p if p.pid in mine else _program_only(p) for p in snapshot.processes)
    )


def _program_only(process: Process) -> Process:
    if isinstance(process.cmdline, Missing) or identify(process.cmdline, process.comm) is not None:
        return process
    words = process.cmdline[0].split() if len(process.cmdline) == 1 else process.cmdline
    return msgspec.structs.replace(process, cmdline=tuple(words[:1]))


def _options(cmdline: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(option, value) of each option that has one."""
    option = ""
    for word in cmdline:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            option = _plain(name)
            if equals:
                yield option, value
        elif option:
            yield option, word


def _replaced(option: str, value: str, tokens: Tokens, shapes: Shapes) -> str:
    if _is_secret(option) and value:
        return tokens.secret(value)
    if option in _TEXT_OPTIONS and not value.startswith(("/", ".")):
        return PROMPT
    return shapes.host(value) if option in _HOST_OPTIONS else value


def _plain(option: str) -> str:
    return option.lstrip("-").replace("_", "-").lower()


def _is_secret(name: str) -> bool:
    setting = settings().get(name)
    return SECRET_NAME.fullmatch(name) is not None or (setting is not None and setting.secret)


def _as_long(new: str, old: str) -> str:
    """`new` with as many bytes as `old` has."""
    size = len(old.encode("utf-8", "surrogatepass"))
    return new if new == old else new[:size].ljust(size, "-")

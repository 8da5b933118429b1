"""Replaces by stable tokens what must not leave the host. Pure: snapshots in, snapshots out, under a key.

Every string of a snapshot goes through one pass, whatever field it stands in: secrets, prompts, addresses, host names,
users, paths below homes, by their shape (`redact_shapes`, `redact_paths`). Some fields are known to be a host, an
environment or a command line; what they name is learned first, and then replaced wherever it stands. So what a later
version adds to the snapshot is redacted without a word here.

The tokens keep what the judge needs: loopback stays loopback, ports stay, two that were equal stay equal, a path in a
cache stays in it. Words of vLLM itself (`vllm.tables.vocabulary`) are never taken for a name that was learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from vllmdiag.model.base import Missing
from vllmdiag.model.bundle import Redaction, TokenKey
from vllmdiag.model.process import Process
from vllmdiag.model.shm import TailState
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.vllm.tables import vocabulary

from .redact_argv import argv_values, environ_values, redacted_argv, redacted_environ, without_bystanders
from .redact_paths import Homes, users_in
from .redact_shapes import LOCAL_NAMES, Shapes
from .redact_tokens import Tokens, is_token

_HOST_FIELDS = {"hostname", "host", "node"}
_PATH_FIELDS = {"path", "exe", "file", "local", "libraries", "device_files", "ipc_paths_missing"}
ACCOUNTS = frozenset(
    {
        *("root", "user", "users", "admin", "nobody", "nonroot", "default", "service", "runner", "core", "app", "home"),
        *("ubuntu", "debian", "centos", "ec2-user", "python", "jovyan", "ray", "worker", "vllm", "inference", "opt"),
        *("model", "models", "public", "shared", "data", "workspace"),
    }
)
"""Names of accounts that are nobody's."""
_SHORTEST_NAME = 3
_SHORTEST_SECRET = 6
_FLAG = re.compile(rb"[^\x00\x01]")

Policy = Callable[[str], str]


class Redactor:
    """Tokens under one key.

    Args:
        key: stays on the host; whoever has it can try values.
        kind: whether the key is the host's own.
        note: why it is not.
    """

    def __init__(self, key: bytes, kind: TokenKey = "host", note: str = "") -> None:
        self._tokens = Tokens(key)
        self.account = Redaction(redacted=True, key=kind, key_id=self._tokens.key_id, note=note)

    def snapshots(self, snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
        """The snapshots, redacted with what is learned from all of them."""
        one_pass = _Pass(self._tokens, snapshots)
        return tuple(one_pass.value(without_bystanders(snapshot)) for snapshot in snapshots)


class _Pass:
    """What was learned from some snapshots, and its use on them."""

    def __init__(self, tokens: Tokens, snapshots: Sequence[Snapshot]) -> None:
        self._tokens, self._shapes = tokens, Shapes(tokens)
        hosts: set[str] = set()
        homes: set[str] = set()
        users: set[str] = set()
        secrets: set[str] = set()
        strings = set()
        for snapshot in snapshots:
            for struct, field, value in _leaves(snapshot):
                strings.add(value)
                if field in _HOST_FIELDS and not isinstance(struct, Missing):
                    hosts |= {value, value.partition(".")[0]}
            for process in snapshot.processes:
                for named in (environ_values(process.environ), argv_values(process.cmdline)):
                    hosts |= named.hosts
                    homes |= named.homes
                    secrets |= named.secrets
        for text in strings:
            users |= users_in(text)
        users |= {home.rstrip("/").rpartition("/")[2] for home in homes}
        self._homes = Homes(tokens, frozenset(home for home in homes if home.count("/") > 1))
        known = vocabulary()
        self._learned = _replacements(
            {
                **{name: tokens.user(name) for name in users if _tells(name, known)},
                **{name: self._shapes.host(name) for name in hosts if _tells(name, known)},
            }
        )
        self._secrets = _replacements(
            {s: tokens.secret(s) for s in secrets if len(s) >= _SHORTEST_SECRET and s.lower() not in known},
            anywhere=True,
        )
        self._seen: dict[tuple[Policy, str], str] = {}

    def value(self, value: Any, policy: Policy | None = None) -> Any:
        """The value with every string in it redacted."""
        policy = policy or self._text
        if isinstance(value, str):
            key = (policy, value)
            if key not in self._seen:
                self._seen[key] = policy(value)
            return self._seen[key]
        if isinstance(value, msgspec.Struct):
            return self._struct(value)
        if isinstance(value, tuple):
            return tuple(self.value(item, policy) for item in value)
        if isinstance(value, dict):
            return {self.value(name): self.value(item, policy) for name, item in value.items()}
        return value

    def _struct(self, struct: msgspec.Struct) -> msgspec.Struct:
        changed = {}
        for field in struct.__struct_fields__:
            old = getattr(struct, field)
            new = self._field(struct, field, old)
            if new != old:
                changed[field] = new
        return msgspec.structs.replace(struct, **changed) if changed else struct

    def _field(self, struct: msgspec.Struct, field: str, value: Any) -> Any:
        if isinstance(struct, Process) and field == "environ":
            new = redacted_environ(value, self._tokens, self._shapes, self._path)
            return {self._text(name): text for name, text in new.items()}
        if isinstance(struct, Process) and field == "cmdline" and isinstance(value, tuple):
            policy = self._path if len(value) > 1 else self._text
            return tuple(self.value(word, policy) for word in redacted_argv(value, self._tokens, self._shapes))
        if isinstance(struct, TailState) and field == "tail":
            return _FLAG.sub(b"\xff", value)  # flags are 0 and 1: of anything else only that it is there may be kept
        if field in _HOST_FIELDS and isinstance(value, str):
            return self._text(self._shapes.host(value))
        return self.value(value, self._path if field in _PATH_FIELDS else None)

    def _text(self, text: str) -> str:
        return self._pass(text, self._homes.text)

    def _path(self, text: str) -> str:
        alone = text.startswith("/")
        return self._pass(text, self._homes.path if alone else self._homes.text)

    def _pass(self, text: str, homes: Policy) -> str:
        if not text or is_token(text):
            return text
        text = self._secrets(self._shapes.secrets(text))
        return self._learned(self._shapes.places(homes(text)))


def _leaves(value: Any, struct: msgspec.Struct | None = None, field: str = "") -> Iterator[tuple[Any, str, str]]:
    """(struct, field, string) of every string in a value."""
    if isinstance(value, str):
        yield struct, field, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _leaves(getattr(value, name), value, name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item, struct, field)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(name, struct, "")
            yield from _leaves(item, struct, "")


def _tells(name: str, known: Iterable[str]) -> bool:
    """Whether a name that was learned tells of somebody: no word of vLLM, no account of everybody, no number."""
    word = name.lower()
    return (
        len(name) >= _SHORTEST_NAME
        and not name.isdigit()
        and word not in known
        and word not in ACCOUNTS
        and word not in LOCAL_NAMES
        and not is_token(name)
    )


def _replacements(tokens: dict[str, str], *, anywhere: bool = False) -> Policy:
    """Replaces each name, whatever its case, where it stands as a word, or anywhere."""
    if not tokens:
        return lambda text: text
    by_name = {name.lower(): token for name, token in tokens.items()}
    names = "|".join(re.escape(name) for name in sorted(by_name, key=lambda name: (-len(name), name)))
    pattern = re.compile(names if anywhere else rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])", re.IGNORECASE)
    return lambda text: pattern.sub(lambda found: by_name[found[0].lower()], text)

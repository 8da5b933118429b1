"""The playbooks: one Markdown file a cause, with front matter that the catalogue and `playbook match` rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from vllmdiag.model.diagnosis import Diagnosis, Finding, Subject, Verdict

PLACEHOLDERS = {
    "pid": "PID",
    "pids": "PIDS",
    "target": "TARGET",
    "engine": "ENGINE",
    "server": "SERVER",
    "port": "PORT",
    "node": "NODE",
}
"""Name in braces -> what stands for it where no diagnosis fills it in.

``pid`` is the process at fault, ``pids`` are all of the instance, ``target`` is any one of them, ``engine`` and
``server`` are its EngineCore and its API server, ``port`` is where it listens for HTTP, ``node`` where it runs.
"""

_FENCE = re.compile(r"\A---\n(?P<front>.*?)\n---\n+# (?P<title>[^\n]+)\n(?P<body>.*)\Z", re.DOTALL)
_LISTS = {"keywords", "log_lines", "reports"}


class Playbook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One playbook."""

    cause: str
    layer: int
    severity: str
    versions: str
    """Versions of vLLM it applies to, in words."""
    evidence: str
    """What must be seen before it applies; the catalogue's words."""
    keywords: tuple[str, ...]
    """Words of people who meet it."""
    log_lines: tuple[str, ...]
    """Known log lines that speak for it: the id of a kind, or ``id:part`` where only that part of the line does."""
    reports: tuple[str, ...]
    """Public reports of it."""
    title: str
    body: str
    """Markdown after the title."""


def read(text: str) -> Playbook:
    """Take a playbook apart.

    The front matter is YAML of the plainest kind: ``key: text``, or ``key:`` and a list of ``  - text``. Text that
    YAML would read as something else stands in double quotes.

    Raises:
        ValueError: no front matter, no title, or a line of the front matter that is neither of these.
    """
    parts = _FENCE.match(text)
    if parts is None:
        raise ValueError("a playbook is: ---, front matter, ---, an empty line, # title, the text")
    fields: dict[str, str | list[str]] = {name: [] for name in _LISTS}
    items: list[str] | None = None
    for line in parts["front"].splitlines():
        if line.startswith("  - ") and items is not None:
            items.append(_scalar(line[4:]))
            continue
        key, colon, value = line.partition(":")
        if not colon or not key.isidentifier() or (key in _LISTS) == bool(value):
            raise ValueError(f"not understood in the front matter: {line}")
        if key in _LISTS:
            fields[key] = items = []
        else:
            fields[key], items = _scalar(value.strip()), None
    try:
        return msgspec.convert(
            {**fields, "title": parts["title"].strip(), "body": parts["body"].strip("\n") + "\n"},
            Playbook,
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _scalar(text: str) -> str:
    if text.startswith('"'):
        return str(json.loads(text))
    if ": " in text or " #" in text or text.endswith(":") or text[:1] in {*"'[]{}>|*&!%#`@,?-", ""}:
        raise ValueError(f"needs double quotes to be YAML: {text}")
    return text


@cache
def playbooks() -> dict[str, Playbook]:
    """All playbooks by cause, in the order of layers and then of names.

    Raises:
        ValueError: a file is no playbook (a bug of vllmdiag).
    """
    packaged = resources.files("vllmdiag") / "playbooks"
    # In a checkout they stand beside the package, where people look for them.
    directory = packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "playbooks"
    found = [read(entry.read_text(encoding="utf-8")) for entry in directory.iterdir() if entry.name.endswith(".md")]
    return {book.cause: book for book in sorted(found, key=lambda book: (book.layer, book.cause))}


def fill(text: str, words: Mapping[str, str]) -> str:
    """Put words in place of the placeholders; those without one get their plain name (``PID``). Other braces stay."""
    for name, plain in PLACEHOLDERS.items():
        text = text.replace("{" + name + "}", words.get(name, plain))
    return text


def found_in(diagnosis: Diagnosis, slug: str) -> Verdict | Finding | None:
    """Where a diagnosis names a cause: in its verdict, else in its first finding of it; None where it does not."""
    if diagnosis.verdict.cause == slug:
        return diagnosis.verdict
    return next((finding for finding in diagnosis.findings if finding.cause == slug), None)


def words_of(diagnosis: Diagnosis, slug: str) -> dict[str, str]:
    """What a diagnosis knows to fill in.

    Args:
        diagnosis: any diagnosis.
        slug: the cause of the playbook. Where the diagnosis does not find it there is no ``pid``.
    """
    target = diagnosis.target
    whole = (*target.api_server_pids, *target.coordinator_pids, *target.engine_pids, *target.worker_pids)
    found = found_in(diagnosis, slug)
    chain = [link.subject for link in found.chain] if found is not None else []
    words = {
        "pid": found.subject.pid if found is not None else None,
        "pids": ",".join(map(str, whole)) or None,
        "target": next(iter(whole), None),
        "engine": _in_chain(chain, "EngineCore", target.engine_pids),
        "server": _in_chain(chain, "APIServer", target.api_server_pids),
        "port": target.port,
        "node": found.subject.node if found is not None else None,
    }
    return {name: str(word) for name, word in words.items() if word is not None}


def _in_chain(chain: list[Subject], role: str, others: tuple[int, ...]) -> int | None:
    """The one of a role that the chain of waits passes through, else the first of the instance."""
    return next((s.pid for s in chain if s.role == role and s.pid is not None), next(iter(others), None))

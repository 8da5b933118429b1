"""What `playbook` and `explain` print for other programs."""

from __future__ import annotations

from typing import Literal

from .base import Fact

PLAYBOOKS_SCHEMA = "vllmdiag.playbooks/1"
EXPLANATIONS_SCHEMA = "vllmdiag.explanations/1"


class KnownLine(Fact, frozen=True, kw_only=True):
    """A line of a log that is known, as it was found in a text."""

    id: str
    said: str
    """The words of the log that were recognised."""
    meaning: str
    echo: bool
    """Only the echo of a fault elsewhere: the cause stands above it in the log, or in another process."""


class PlaybookDocument(Fact, frozen=True, kw_only=True):
    """One playbook: all of it (`show`), or what stands in front of it (`list`, `match`)."""

    cause: str
    title: str
    layer: int
    severity: str
    versions: str
    evidence: str
    reports: tuple[str, ...] = ()
    text: str = ""
    """Markdown, with the pids of the diagnosis filled in; empty in `list` and `match`."""
    score: int | None = None
    """How well it fits the text given to `match`: more is better, and equal texts give equal scores."""
    because: tuple[str, ...] = ()
    """What in that text speaks for it."""


class Playbooks(Fact, frozen=True, kw_only=True):
    """The playbooks that were asked for, best first; none where nothing fits."""

    schema: str = PLAYBOOKS_SCHEMA
    playbooks: tuple[PlaybookDocument, ...]
    known_lines: tuple[KnownLine, ...] = ()
    """Known lines in the text given to `match`."""


class Explanation(Fact, frozen=True, kw_only=True):
    """What a cause or a term means."""

    kind: Literal["cause", "term"]
    name: str
    title: str
    text: str
    evidence: str = ""
    """Of a cause: what sets it apart."""
    not_to_be_confused: str = ""
    """Of a cause: the look-alike that it is not."""
    see: tuple[str, ...] = ()
    """Other causes and terms, and commands that show it."""


class Explanations(Fact, frozen=True, kw_only=True):
    """The one that was asked for, or all there are."""

    schema: str = EXPLANATIONS_SCHEMA
    explanations: tuple[Explanation, ...]

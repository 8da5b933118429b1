"""`vllmdiag playbook`: what to do about a cause, found by its name or by a symptom."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllmdiag.catalogue.playbooks import Playbook, fill, playbooks, words_of
from vllmdiag.catalogue.symptoms import known_lines, match
from vllmdiag.cli.options import Ascii, Color, Destination, output_of
from vllmdiag.cli.output import Output
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.errors import BadDataError, ExitCode, UsageError
from vllmdiag.model.playbook import PlaybookDocument, Playbooks
from vllmdiag.render.document import to_json
from vllmdiag.render.playbook import list_text, matches_text, playbook_text

EPILOG = """Examples:

\b
  vllmdiag playbook list
  vllmdiag playbook show process-stopped
  vllmdiag diagnose --format json | vllmdiag playbook show --from -
  vllmdiag playbook show worker-dead --from diagnosis.json --format markdown
  vllmdiag playbook match "health is 200 but requests hang"
  tail -n 500 vllm.log | vllmdiag playbook match -

\b
show: with --from, the pids of that diagnosis stand in the commands, and its cause is the one that is shown.
match: the text is lines of a log or a symptom in words; exit code 3 where nothing fits."""


class Action(str, Enum):
    """What to do with the playbooks."""

    LIST = "list"
    SHOW = "show"
    MATCH = "match"


class BookFormat(str, Enum):
    """Forms of the product; Markdown is for a ticket."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def run(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(metavar="list|show|match", help="What to do.")] = Action.LIST,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[CAUSE|TEXT]", help="show: a cause. match: a text, or - for stdin.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="show: a diagnosis in JSON, - for stdin.")
    ] = None,
    format: Annotated[BookFormat, typer.Option("--format", "-f", help="Form of the product.")] = BookFormat.TEXT,
    output: Destination = None,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """List the playbooks, show one, or find those that fit a symptom."""
    out = output_of(context, output, color, ascii)
    given = words or []
    if format is BookFormat.MARKDOWN and action is not Action.SHOW:
        raise UsageError("only `show` writes Markdown", next=f"vllmdiag playbook {action.value} --format text")
    if action is Action.LIST:
        return _list(out, format, given)
    if action is Action.SHOW:
        return _show(out, format, given, _diagnosis(source) if source is not None else None)
    return _match(out, format, given)


def _list(out: Output, format: BookFormat, given: Sequence[str]) -> int:
    if given:
        raise UsageError("list takes no name", next=f"vllmdiag playbook show {given[0]}")
    books = tuple(_document(book) for book in playbooks().values())
    out.write(to_json(Playbooks(playbooks=books)) if format is BookFormat.JSON else list_text(books, out.style))
    return ExitCode.OK


def _show(out: Output, format: BookFormat, given: Sequence[str], diagnosis: Diagnosis | None) -> int:
    if len(given) > 1 or (not given and diagnosis is None):
        raise UsageError(
            "show takes one cause", why="none is given" if not given else "several are", next="vllmdiag playbook list"
        )
    slug = given[0] if given else diagnosis.verdict.cause if diagnosis is not None else ""
    if slug not in playbooks():
        raise UsageError(f"no playbook is called {slug}", next="vllmdiag playbook list")
    book = playbooks()[slug]
    words = words_of(diagnosis, slug) if diagnosis is not None else {}
    document = msgspec.structs.replace(_document(book), text=fill(book.body, words))
    if format is BookFormat.JSON:
        out.write(to_json(Playbooks(playbooks=(document,))))
    elif format is BookFormat.MARKDOWN:
        out.write(f"# {document.title}\n\n{document.text}")
    else:
        out.write(playbook_text(document, diagnosis, out.style))
    return ExitCode.OK


def _match(out: Output, format: BookFormat, given: Sequence[str]) -> int:
    text = sys.stdin.buffer.read().decode("utf-8", "replace") if list(given) == ["-"] else " ".join(given)
    if not text.strip():
        raise UsageError("match takes a text", why="it is empty", next='vllmdiag playbook match "requests hang"')
    books = tuple(
        msgspec.structs.replace(_document(found.book), score=found.score, because=found.because)
        for found in match(text)
    )
    lines = known_lines(text)
    as_json = format is BookFormat.JSON
    out.write(
        to_json(Playbooks(playbooks=books, known_lines=lines)) if as_json else matches_text(books, lines, out.style)
    )
    return ExitCode.OK if books else ExitCode.UNKNOWN


def _document(book: Playbook) -> PlaybookDocument:
    """What stands in front of a playbook."""
    return PlaybookDocument(
        cause=book.cause,
        title=book.title,
        layer=book.layer,
        severity=book.severity,
        versions=book.versions,
        evidence=book.evidence,
        reports=book.reports,
    )


def _diagnosis(source: str) -> Diagnosis:
    """The diagnosis in a file, or on stdin for ``-``."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return msgspec.json.decode(data, type=Diagnosis)
    except OSError as error:
        raise UsageError(f"cannot read {source}", why=str(error.strerror), next="--from FILE") from None
    except msgspec.MsgspecError as error:
        raise BadDataError(
            f"{'stdin' if source == '-' else source} is no diagnosis",
            why=str(error),
            next="vllmdiag diagnose --format json > diagnosis.json",
        ) from None

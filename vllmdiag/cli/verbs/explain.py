"""`vllmdiag explain`: what a cause or a term means."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from vllmdiag.catalogue.entries import Cause, catalogue
from vllmdiag.catalogue.terms import Term, find, names, plain, terms
from vllmdiag.cli.options import Ascii, Color, Destination, Format, output_of
from vllmdiag.model.errors import ExitCode, UsageError
from vllmdiag.model.playbook import Explanation, Explanations
from vllmdiag.render.document import to_json
from vllmdiag.render.playbook import explanation_text, names_text

EPILOG = """Examples:

\b
  vllmdiag explain process-stopped      a cause that a verdict names
  vllmdiag explain slow joiner          a term
  vllmdiag explain                      everything that can be explained"""


def run(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[CAUSE|TERM]", help="What to explain.")] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    color: Color = None,
    ascii: Ascii = False,
) -> int:
    """Explain a cause or a term in plain words."""
    out = output_of(context, output, color, ascii)
    as_json = format is Format.JSON
    if not words:
        if as_json:
            everything = (*map(_of_cause, catalogue().values()), *map(_of_term, terms()))
            out.write(to_json(Explanations(explanations=everything)))
        else:
            out.write(names_text(catalogue(), (term.name for term in terms()), out.style))
        return ExitCode.OK
    explained = _explain(" ".join(words))
    out.write(to_json(Explanations(explanations=(explained,))) if as_json else explanation_text(explained, out.style))
    return ExitCode.OK


def _explain(word: str) -> Explanation:
    causes = {plain(slug): entry for slug, entry in catalogue().items()}
    if plain(word) in causes:
        return _of_cause(causes[plain(word)])
    term = find(word)
    if term is not None:
        return _of_term(term)
    near = get_close_matches(plain(word), [*causes, *names()], n=3)
    raise UsageError(
        f"nothing is known of {word}",
        why=f"near to it: {', '.join(near)}" if near else "neither a cause nor a term",
        next=f"vllmdiag explain {near[0]}" if near else "vllmdiag explain",
    )


def _of_cause(entry: Cause) -> Explanation:
    return Explanation(
        kind="cause",
        name=entry.slug,
        title=f"{entry.slug}: {entry.title}",
        text=entry.meaning,
        evidence=entry.evidence.strip("-"),
        not_to_be_confused=entry.not_to_be_confused.strip("-"),
        see=(f"vllmdiag playbook show {entry.slug}",),
    )


def _of_term(term: Term) -> Explanation:
    also = f" (also: {', '.join(term.also)})" if term.also else ""
    return Explanation(kind="term", name=term.name, title=term.name + also, text=term.text, see=term.see)

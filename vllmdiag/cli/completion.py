"""What may stand at the end of a command line: asked by the scripts of `vllmdiag completion`, answered in lines.

A candidate is a line: the word, a tab, a note. What goes where a value is wanted is told by its metavar, so a verb that
takes a ``CAUSE`` has it completed without a word here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllmdiag.cli import surface
from vllmdiag.cli.app import VERBS
from vllmdiag.cli.surface import Parameter, Verb
from vllmdiag.model.errors import ExitCode


class Candidate(NamedTuple):
    """A word that may stand there."""

    word: str
    note: str = ""


def answer(words: Sequence[str]) -> int:
    """Print the candidates for the last of the words; the others stand before it. Never fails: a shell asks."""
    with contextlib.suppress(Exception):
        for word, note in candidates(words):
            print(f"{word}\t{' '.join(note.split())}")
    return ExitCode.OK


def candidates(words: Sequence[str]) -> tuple[Candidate, ...]:
    """What the last word may become.

    Args:
        words: the command line without the name of the program, as far as it goes; the last one is unfinished, or
            empty where a new word begins.

    Returns:
        In the order of the help. None where a file name is wanted: the shell knows those.
    """
    *before, last = [*words] or [""]
    if "=" in (last, *before[-1:]):  # bash makes three words of --format=json
        before, last = [word for word in before if word != "="], last.lstrip("=")
    verb, rest = _verb(before)
    if verb is None:
        found = _of_program(rest, last)
    elif rest and (wants := _wants_value(verb, rest[-1])) is not None:
        found = _values(wants)
    elif last.startswith("-"):
        flag, equals, _ = last.partition("=")
        option = surface.flags_of(verb.parameters).get(flag) if equals else None
        found = (Candidate(f"{flag}={c.word}", c.note) for c in _values(option)) if option else _options(verb, rest)
    else:
        found = _positional(verb, rest)
    return tuple(candidate for candidate in found if candidate.word.startswith(last))


def _verb(before: Sequence[str]) -> tuple[Verb | None, list[str]]:
    """The verb of a command line and the words after it, or None and the words that are no verb yet."""
    flags = surface.flags_of(surface.program().parameters)
    skip = False
    for i, word in enumerate(before):
        if skip or word.startswith("-"):
            skip = not skip and word in flags and bool(flags[word].metavar)
            continue
        two = " ".join(before[i : i + 2])
        if two in VERBS and two != word:
            return surface.verb(two), list(before[i + 2 :])
        if word in VERBS:
            return surface.verb(word), list(before[i + 1 :])
        return None, list(before[i:])
    return None, [before[-1]] if skip else []


def _of_program(rest: Sequence[str], last: str) -> Iterable[Candidate]:
    """Before the verb is whole: verbs by their first word, the second words of `lab`, or options of the program."""
    program = surface.program()
    if rest and rest[0].startswith("-"):
        wants = _wants_value(program, rest[0])
        return _values(wants) if wants is not None else ()
    if rest:
        return _second_words(rest[0]) if len(rest) == 1 else ()
    if last.startswith("-"):
        return _options(program, ())
    firsts: dict[str, str] = {}
    for name, summary in VERBS.items():
        first, _, second = name.partition(" ")
        firsts.setdefault(first, summary if not second else ", ".join(c.word for c in _second_words(first)))
    return (Candidate(first, note) for first, note in firsts.items())


def _second_words(first: str) -> tuple[Candidate, ...]:
    pairs = ((name.partition(" "), summary) for name, summary in VERBS.items())
    return tuple(Candidate(second, summary) for (head, _, second), summary in pairs if second and head == first)


def _wants_value(verb: Verb, word: str) -> Parameter | None:
    """The option that the word is, where its value comes next."""
    option = surface.flags_of(verb.parameters).get(word)
    return option if option is not None and option.metavar else None


def _options(verb: Verb, given: Sequence[str]) -> Iterator[Candidate]:
    """Options by their long flags; those that stand there already are left out unless they may come again."""
    for option in verb.options:
        if option.many or not set(option.flags) & set(given):
            yield from (Candidate(flag, option.help) for flag in option.flags if flag.startswith("--"))


def _positional(verb: Verb, rest: Sequence[str]) -> Iterator[Candidate]:
    n = 0
    for before, word in zip(["", *rest], rest, strict=False):
        n += not word.startswith("-") and _wants_value(verb, before) is None
    if n == 0:
        yield from _second_words(verb.name)
    if verb.arguments and (n < len(verb.arguments) or verb.arguments[-1].many):
        yield from _values(verb.arguments[min(n, len(verb.arguments) - 1)])


def _values(parameter: Parameter) -> Iterable[Candidate]:
    if parameter.choices:
        return [Candidate(choice) for choice in parameter.choices]
    # CAUSE[=SUBJECT], [FAULT]..., FILE|TARGET: the word in capitals says what it is
    words = re.findall(r"(?:^\[?|\|)([A-Z]+)", parameter.metavar)
    return [candidate for word in words if word in VALUES for candidate in VALUES[word]()]


def _pids() -> Iterator[Candidate]:
    from vllmdiag.sources.target import running

    processes, instances = running()
    states = {process.pid: process.state for process in processes}
    for instance in instances:
        options = instance.options
        where = f", port {options.port}" if options is not None and not options.headless else ""
        for member in instance.members:
            if member.role not in ("Helper", "ResourceTracker"):
                top = where if member.pid in instance.roots else ""
                yield Candidate(str(member.pid), f"{member.label}{top}, state {states[member.pid]}")


def _ports() -> Iterator[Candidate]:
    from vllmdiag.sources.collect import list_instances

    return (Candidate(str(line.port), f"{line.role} {line.pid}") for line in list_instances() if line.port)


def _causes() -> Iterator[Candidate]:
    from vllmdiag.catalogue.entries import catalogue

    return (Candidate(entry.slug, f"layer {entry.layer}: {entry.title}") for entry in catalogue().values())


def _terms() -> Iterator[Candidate]:
    from vllmdiag.catalogue.terms import terms

    return (Candidate(term.name.replace(" ", "-"), term.text.partition(". ")[0]) for term in terms())


def _faults() -> Iterator[Candidate]:
    from vllmdiag.lab.faults import faults

    return (Candidate(fault.name, fault.does) for fault in faults().values())


def _experiments() -> Iterator[Candidate]:
    from vllmdiag.lab.experiments import EXPERIMENTS

    return (Candidate(name, shows) for name, shows in EXPERIMENTS.items())


def _documents() -> Iterator[Candidate]:
    from vllmdiag.render.document import DOCUMENTS

    return (Candidate(name, identity) for name, (identity, _) in DOCUMENTS.items())


VALUES: Mapping[str, Callable[[], Iterable[Candidate]]] = {
    "TARGET": _pids,
    "PID": _pids,
    "PORT": _ports,
    "CAUSE": _causes,
    "TERM": _terms,
    "FAULT": _faults,
    "EXPERIMENT": _experiments,
    "DOCUMENT": _documents,
}
"""Metavar, or a part of one between bars -> what may stand there. Of the others the shell completes file names."""

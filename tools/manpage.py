"""Writes the man page from the command line itself: `python -m tools.manpage` (a test says when it is behind)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vllmdiag import __version__
from vllmdiag.cli import surface
from vllmdiag.cli.app import VERBS
from vllmdiag.cli.options import with_common_options
from vllmdiag.cli.surface import Parameter, Verb
from vllmdiag.model.errors import ExitCode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "man" / "vllmdiag.1"

DESCRIPTION = """\
Your vLLM server does not answer. vllmdiag looks at it from outside and names the first blocker: which process or rank,
in which layer, doing what, since when, who waits for it, how sure that is, and the one next step.

Nothing is written to the server, nothing is traced or paused, and nothing is connected to but its HTTP port and NCCL's
status port, unless an option asks for more. What could not be observed is said; blind is never reported as healthy.

The product goes to standard output, progress, hints and errors to standard error."""

EXITS = {
    ExitCode.OK: "ok",
    ExitCode.WARNING: "warning: something is wrong, and the server works",
    ExitCode.CRITICAL: "critical: the first blocker is named",
    ExitCode.UNKNOWN: "unknown: too little could be observed",
    ExitCode.USAGE: "the command line is not understood",
    ExitCode.BAD_DATA: "a bundle, a file or a document is not what it should be",
    ExitCode.NO_TARGET: "there is no such instance, or there are several",
    ExitCode.NO_HELPER: "a helper program is missing",
    ExitCode.BUG: "a bug in vllmdiag",
    ExitCode.TIMED_OUT: "timed out",
    ExitCode.NOT_PERMITTED: "not permitted",
    ExitCode.INTERRUPTED: "interrupted",
}

ENVIRONMENT = {
    "NO_COLOR": "Set to anything: no colour, unless --color says otherwise.",
    "VLLMDIAG_DEBUG": "1: show the traceback of a bug in vllmdiag, for a report of it.",
    "VLLMDIAG_CACHE": "vllmdiag.pyz alone: the directory that it unpacks into, instead of ~/.cache/vllmdiag.",
    "PATH": "py-spy is looked for beside the Python that runs vllmdiag, then here.",
}


def common() -> tuple[Parameter, ...]:
    """The options that every verb that looks at an instance has."""

    def nothing_of_its_own(common: object) -> int:
        del common
        return 0

    return surface.parameters(with_common_options(nothing_of_its_own))


def text() -> str:
    """The page in roff."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield '.\\" written by tools/manpage.py'
    yield f'.TH VLLMDIAG 1 "" "vllmdiag {__version__}" "User Commands"'
    yield from (".SH NAME", "vllmdiag \\- name the first blocker of a vLLM server that does not answer")
    yield from (".SH SYNOPSIS", ".B vllmdiag", "[\\fIOPTION\\fR]... \\fIVERB\\fR [\\fIARGUMENT\\fR]...")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(DESCRIPTION)
    shared = common()
    yield ".SH OPTIONS"
    yield "Before any verb:"
    yield from _parameters(surface.program().options)
    yield ".PP"
    yield "Of every verb that looks at an instance:"
    yield from _parameters(shared)
    yield ".SH VERBS"
    for name in VERBS:
        yield from _verb(surface.verb(name), shared)
    yield from (".SH EXIT STATUS", *_table({str(int(code)): words for code, words in EXITS.items()}))
    yield from (".SH ENVIRONMENT", *_table(ENVIRONMENT))
    yield from (".SH SEE ALSO", ".BR py-spy (1),", ".BR ss (8),", ".BR proc (5)")


def _verb(verb: Verb, shared: tuple[Parameter, ...]) -> Iterator[str]:
    own = [p for p in verb.parameters if p not in (*shared, surface.HELP)]
    looks = all(p in verb.parameters for p in shared)
    words = [_place(p) for p in (shared[0], *own) if not p.flags and (p in own or looks)]
    yield f".SS {verb.name}"
    yield f".B vllmdiag {_escape(verb.name)}"
    if any(p.flags for p in own) or looks:
        words.insert(0, "[\\fIOPTION\\fR]...")
    yield " ".join(words) or ".br"
    yield ".PP"
    yield _escape(verb.summary)
    yield from _parameters(own)
    for paragraph in verb.epilog.split("\n\n"):
        lines = paragraph.removeprefix("\b\n").strip("\n").split("\n")
        if lines == ["Examples:"]:
            continue
        yield ".PP"
        if lines[0].startswith("  "):
            yield from (".nf", *(_escape(line) for line in lines), ".fi")
        else:
            yield from map(_escape, lines)


def _place(argument: Parameter) -> str:
    word = argument.metavar.strip("[]").removesuffix("]...")
    shown = f"\\fI{_escape(word)}\\fR"
    return (shown if argument.required else f"[{shown}]") + ("..." if argument.many else "")


def _parameters(parameters: tuple[Parameter, ...] | list[Parameter]) -> Iterator[str]:
    for parameter in parameters:
        value = f" \\fI{_escape(parameter.metavar)}\\fR" if parameter.metavar else ""
        flags = ", ".join(f"\\fB{_escape(flag)}\\fR" for flag in parameter.flags)
        default = f" [{parameter.default}]" if parameter.default else ""
        yield from (".TP", (flags + value).strip(), _escape(parameter.help + default))


def _table(rows: dict[str, str]) -> Iterator[str]:
    for name, words in rows.items():
        yield from (".TP", f".B {_escape(name)}", _escape(words))


def _paragraphs(text: str) -> Iterator[str]:
    for i, paragraph in enumerate(text.split("\n\n")):
        yield from ((".PP",) if i else ())
        yield from map(_escape, paragraph.splitlines())


def _escape(text: str) -> str:
    """Text as roff shows it as it stands: no escape, no request, hyphens that can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(\s*)(['.])", r"\1\\&\2", text)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(f"written: {PAGE}")

"""The verbs, and the typer application built for one command line: only the verb that is asked for is imported."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Annotated

import typer

from vllmdiag import version_text
from vllmdiag.cli.options import Ascii, Color, with_common_options
from vllmdiag.model.errors import ExitCode

VERBS = {
    "diagnose": "Name the first blocker: the verdict, its evidence and the next step.",
    "check": "One line and an exit code: for probes, pipelines and monitoring.",
    "watch": "Live view; captures a stall before a restart destroys the evidence.",
    "replay": "A recording of watch, again.",
    "ps": "Processes of the instance: tree, roles, ranks, states.",
    "endpoints": "Sockets between them: who binds, who is connected, what waits.",
    "shm": "Shared memory: capacity, who holds what, what is orphaned.",
    "shm clean": "Show, or with --yes remove, segments of vLLM that nobody holds.",
    "ring": "Shared-memory queues: slots, readers that lag, messages per second.",
    "stacks": "Python stacks of every process, equal ones folded.",
    "gpu": "Devices, NCCL and flight recorder: one row a rank, those that differ named.",
    "client": "The HTTP side: connections, health, counters that move.",
    "triage": "Pasted evidence in (files, archives, a bug report), verdict out.",
    "report": "The diagnosis as one page of HTML, drawn: for those who would rather look.",
    "capture": "All that can be seen, redacted, in one file to be judged elsewhere.",
    "diff": "Two bundles compared, rank by rank.",
    "playbook": "What to do about a cause, found by its name or by a symptom.",
    "explain": "What a cause or a term means, in plain words.",
    "fleet diagnose": "One verdict over all nodes of an engine: Ray, ssh, kubectl, Slurm, or bundles.",
    "fleet node": "What one node answers to `fleet diagnose`.",
    "plan": "What a topology needs of each node, and what breaks first; a live node against it.",
    "ledger": "Who copies what on the way of a request and in a step; live, where the time goes.",
    "lab up": "A miniature vLLM of real processes to look at, or to break.",
    "lab faults": "The faults that it can show.",
    "lab run": "One fault, live: start, break, diagnose, compare, clean up.",
    "lab verify": "Every fault and every healthy state; exit code 1 where a diagnosis is wrong.",
    "lab experiment": "A property of the queues and sockets, measured.",
    "schema": "JSON Schema of the documents.",
    "completion": "What makes a shell complete verbs, options, pids, causes.",
}
"""Verb -> what it does, in the order of the help. The module is `vllmdiag.cli.verbs.NAME` (a blank becomes ``_``)."""

EPILOG = """Examples:

\b
  vllmdiag diagnose                     the only instance on this host
  vllmdiag diagnose 2839                the instance that pid 2839 belongs to
  vllmdiag ps --port 8000
  vllmdiag diagnose --format json | jq .verdict

\b
Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown, 64 usage, 66 no such instance, 77 not permitted.
Nothing is written to, paused or restarted."""


def build(args: list[str]) -> tuple[typer.Typer, list[str]]:
    """Make the application for one command line.

    Args:
        args: the arguments without the program name.

    Returns:
        The application, and the arguments with a verb of two words (``shm clean``) joined into one.
    """
    words = _join_two_word_verbs(args)
    app = typer.Typer(
        name="vllmdiag",
        help="Names the first blocker of a vLLM server that does not answer: from outside, read-only, in seconds.",
        epilog=EPILOG,
        rich_markup_mode=None,
        add_completion=False,  # `vllmdiag completion` knows verbs of two words, pids and causes
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(global_options)
    for name, summary in VERBS.items():
        if name in words:
            module = importlib.import_module(f"vllmdiag.cli.verbs.{name.replace(' ', '_')}")
            command, epilog = with_common_options(module.run), module.EPILOG
        else:
            command, epilog = _not_loaded, ""
        app.command(name, help=summary, short_help=summary, epilog=epilog)(command)
    return app, words


def _join_two_word_verbs(args: list[str]) -> list[str]:
    for i, pair in enumerate(pairwise(args)):
        if " ".join(pair) in VERBS:
            return [*args[:i], " ".join(pair), *args[i + 2 :]]
    return list(args)


def _not_loaded() -> int:
    """Stand in the help for a verb that this command line does not name."""
    return ExitCode.BUG


def global_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    color: Color = None,
    ascii: Ascii = False,
) -> None:
    """What may stand before a verb, and what happens without one."""
    if version:
        typer.echo(version_text())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    context.obj = {"color": color, "ascii": ascii}

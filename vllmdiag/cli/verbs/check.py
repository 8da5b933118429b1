"""`vllmdiag check`: one answer for a probe, a pipeline or a monitoring system."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllmdiag.cli.look import evidence, live_only, prepare
from vllmdiag.cli.options import Common
from vllmdiag.cli.output import progress
from vllmdiag.model.check import Baseline, CheckResult
from vllmdiag.model.errors import ExitCode, UsageError, VllmdiagError
from vllmdiag.render.page import Style

EPILOG = """Examples:

\b
  vllmdiag check                        as diagnose, in one line
  vllmdiag check --profile liveness     0 unless a stall, a dead or a stopped process is proven
  vllmdiag check --profile readiness --port 8000
  vllmdiag check --profile ci --wait 300 --expect tp=2,ready,metrics
  vllmdiag check --format junit -o report.xml
  vllmdiag check --ignore client-not-reading --ignore worker-busy=Worker_TP1
  vllmdiag check --listen 127.0.0.1:9400

\b
A kubelet asks it so (an exec probe; the answer takes the window and about half a second more):
  livenessProbe:
    exec: {command: [vllmdiag, check, --profile, liveness]}
    periodSeconds: 30
    timeoutSeconds: 10

\b
Exit codes: 0 ok, 1 warning, 2 critical, 3 unknown, 66 no such instance, 75 out of time. With --format nagios 3 stands
for every answer that could not be had."""

_WINDOW_S = {"liveness": 0.5, "readiness": 0.5, "ci": 3.0, "full": 3.0}
_PATIENCE_S = 30.0


class Form(str, Enum):
    """Forms of the product."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    NAGIOS = "nagios"
    OPENMETRICS = "openmetrics"
    GITHUB = "github"


class ForWhom(str, Enum):
    """Profiles."""

    LIVENESS = "liveness"
    READINESS = "readiness"
    CI = "ci"
    FULL = "full"


class FailOn(str, Enum):
    """What makes the exit code differ from 0, and everything that is worse."""

    WARNING = "warning"
    UNKNOWN = "unknown"
    CRITICAL = "critical"


def run(
    common: Common,
    profile: Annotated[
        ForWhom,
        typer.Option(
            help="Who asks: a probe that restarts (liveness), one that routes (readiness), a pipeline (ci), a person."
        ),
    ] = ForWhom.FULL,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT,...",
            help="What must hold: ready, health, metrics, and tp, pp, dp, ep, workers, api-servers, ring, version,"
            " model, port, cause with a value (tp=2, ring=moving).",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Look again until all is well, for at most so long.", min=0)
    ] = 0.0,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Give up after so long: 30, beside --wait.", min=0.1)
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="What makes the exit code differ from 0, and all that is worse: critical for liveness, else warning."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CAUSE[=SUBJECT]", help="A cause that does not count (of this process or rank alone)."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What is known already and no news; see --write-baseline.")
    ] = None,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Write what is found now to the file of --baseline.")
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(metavar="ADDR", help="Serve metrics there until SIGTERM; each scrape is a check (:9400)."),
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --listen: how long an answer is given again.", min=1)
    ] = 10.0,
    format: Annotated[Form, typer.Option("--format", "-f", help="Form of the product.")] = Form.TEXT,
) -> int:
    """Say in one line whether it is well, for a probe, a pipeline or a monitoring system."""
    try:
        from vllmdiag.diagnosis.profiles import Rule, baseline_of
        from vllmdiag.sources.viewer import started
        from vllmdiag.watch.baseline import read_baseline, write
        from vllmdiag.watch.checks import Question, check, on_this_machine

        if write_baseline and baseline is None:
            raise UsageError("--write-baseline needs a file", why="there is none", next="--baseline FILE")
        known = read_baseline(baseline) if baseline is not None and not write_baseline else Baseline()
        question = Question(
            rule=Rule(
                profile=profile.value,
                fail_on=fail_on.value if fail_on else None,
                ignored=_ignored(ignore or ()),
                baseline=known,
            ),
            wanted=_wanted(expect or ()),
            window_s=common.window_s or _WINDOW_S[profile.value],
            wait_s=wait,
            timeout_s=timeout or wait + _PATIENCE_S,
        )
        say = progress(common.output.verbose)
        if listen is not None:
            live_only(common, "--listen")
            from vllmdiag.watch.exporter import serve

            look = on_this_machine(common.target, common.port, say, meanwhile=prepare)
            serve(listen, lambda: check(question, look), every, _to_stderr)
            return ExitCode.OK
        if common.source is not None:
            held = evidence(common).snapshot
            result = check(question, lambda _window_s: held)
        else:
            try:
                result = check(question, on_this_machine(common.target, common.port, say, started(), prepare))
            finally:
                say("")
        if write_baseline and baseline is not None:
            write(baseline_of(result.diagnosis), baseline)
            return ExitCode.OK
        common.output.write(_product(result, format, common.output.style))
        return result.exit_code
    except VllmdiagError as error:
        if format is not Form.NAGIOS:
            raise
        from vllmdiag.render.nagios import nagios_error

        common.output.write(nagios_error(error))
        return ExitCode.UNKNOWN


def _ignored(texts: list[str] | tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    from vllmdiag.catalogue.entries import catalogue

    pairs = [(cause, subject) for cause, _, subject in (text.partition("=") for text in texts)]
    for cause, _ in pairs:
        if cause not in catalogue():
            raise UsageError(f"no cause is called {cause}", why="it is not in the catalogue", next="vllmdiag explain")
    return tuple(pairs)


def _wanted(texts: list[str] | tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    from vllmdiag.diagnosis.expectations import WORDS, parse

    try:
        return parse(texts)
    except ValueError as error:
        raise UsageError(f"--expect: {error}", why=f"there are {', '.join(WORDS)}", next="vllmdiag check -h") from None


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)


def _product(result: CheckResult, format: Form, style: Style) -> str:
    """The result in a form; each brings its own imports."""
    if format is Form.JSON:
        from vllmdiag.render.document import to_json

        return to_json(result)
    if format is Form.JUNIT:
        from vllmdiag.render.junit import junit_text

        return junit_text(result)
    if format is Form.NAGIOS:
        from vllmdiag.render.nagios import nagios_text

        return nagios_text(result)
    if format is Form.OPENMETRICS:
        from vllmdiag.render.openmetrics import openmetrics_text

        return openmetrics_text(result)
    if format is Form.GITHUB:
        from vllmdiag.render.github import github_text

        return github_text(result)
    from vllmdiag.render.check import check_text

    return check_text(result, style)

"""The options that every verb has, declared once, and the value that a verb gets of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from vllmdiag.cli.output import Output


class Format(str, Enum):
    """Forms of the product."""

    TEXT = "text"
    JSON = "json"


class ColorWhen(str, Enum):
    """When to write colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


Color = Annotated[
    ColorWhen | None,
    typer.Option("--color", help="Colour: on a terminal (auto), always or never; NO_COLOR is honoured."),
]
Ascii = Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")]
Destination = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there.")]


def output_of(
    context: typer.Context, file: Path | None, color: ColorWhen | None, ascii: bool, verbose: int = 0
) -> Output:
    """Where and how to write; what stands before the verb counts where nothing stands after it."""
    before = context.obj or {}
    when = color or before.get("color") or ColorWhen.AUTO
    return Output(file=file, color=when.value, ascii=ascii or before.get("ascii", False), verbose=verbose)


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said that every verb understands."""

    target: int | None = None
    port: int | None = None
    window_s: float | None = None
    """None: as long as the verb needs."""
    source: str | None = None
    """A bundle or a snapshot to look at instead of this machine; ``-`` is standard input."""
    format: Format = Format.TEXT
    output: Output = Output()


def _common_options(
    context: typer.Context,
    target: Annotated[int | None, typer.Argument(metavar="TARGET", help="Any pid of the instance.", min=1)] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="HTTP port of the instance.", min=1, max=65535)
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long to watch for motion: 3 to judge, 0.5 as a probe, else 1.",
            min=0.2,
            max=600.0,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="Look at a bundle or snapshot, not this machine; - for stdin."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", "-f", help="Form of the product.")] = Format.TEXT,
    output: Destination = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more, fold nothing.")
    ] = 0,
    color: Color = None,
    ascii: Ascii = False,
) -> Common:
    """Gather the common options."""
    return Common(
        target=target,
        port=port,
        window_s=window,
        source=source,
        format=format,
        output=output_of(context, output, color, ascii, verbose),
    )


def with_common_options(run: Callable[..., int]) -> Callable[..., int]:
    """Give a verb the common options beside its own.

    Args:
        run: the verb. Its first parameter is the `Common`; the others are its own options, and one that has the name of
            a common option takes its place (`check` has more formats). A verb without a parameter called `common` is
            returned as it is.

    Returns:
        A function whose signature, which typer reads, holds both sets of options.
    """
    own = inspect.signature(run, eval_str=True).parameters
    if "common" not in own:
        return run
    every = inspect.signature(_common_options, eval_str=True).parameters
    shared = {name: parameter for name, parameter in every.items() if name not in own}
    parameters = {**shared, **{name: own[name] for name in own if name != "common"}}

    def command(**given: Any) -> int:
        return run(_common_options(**{name: given.pop(name) for name in shared}), **given)

    command.__doc__ = run.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    # functions may carry a signature of their own (PEP 362); the type checker does not know
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command

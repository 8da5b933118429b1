"""The command line as a value: verbs, arguments, options, read from the signatures that typer reads.

Completion, the man page and the tests of the documents go by it, so none of them can say what the program does not do.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import typer
from typer.models import ArgumentInfo, OptionInfo

from vllmdiag.cli.app import VERBS, global_options
from vllmdiag.cli.options import with_common_options


class Parameter(NamedTuple):
    """An argument or an option of a verb."""

    name: str
    flags: tuple[str, ...]
    """As they are typed (``--port``); none for an argument."""
    metavar: str
    """What stands for the value; empty for a switch."""
    help: str
    choices: tuple[str, ...] = ()
    many: bool = False
    """May be given several times."""
    required: bool = False
    default: str = ""
    """In words; empty where there is none worth a word."""


class Verb(NamedTuple):
    """One verb, or the program itself with what may stand before a verb."""

    name: str
    """Empty for the program itself."""
    summary: str
    parameters: tuple[Parameter, ...]
    epilog: str = ""

    @property
    def options(self) -> tuple[Parameter, ...]:
        """Those with flags."""
        return tuple(p for p in self.parameters if p.flags)

    @property
    def arguments(self) -> tuple[Parameter, ...]:
        """Those without, in their order."""
        return tuple(p for p in self.parameters if not p.flags)


HELP = Parameter("help", ("--help", "-h"), "", "Show this message and exit.")
"""Every verb has it; typer adds it."""


def program() -> Verb:
    """What may stand before any verb."""
    return Verb("", "", (*parameters(global_options), HELP))


def verb(name: str) -> Verb:
    """One verb. Raises KeyError for a name that is not in `VERBS`."""
    summary = VERBS[name]
    module = importlib.import_module(f"vllmdiag.cli.verbs.{name.replace(' ', '_')}")
    return Verb(name, summary, (*parameters(with_common_options(module.run)), HELP), module.EPILOG)


def parameters(run: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The arguments and options in the signature of a function as typer takes it."""
    signature = inspect.signature(run, eval_str=True)
    return tuple(
        _parameter(name, parameter)
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not typer.Context
    )


def _parameter(name: str, parameter: inspect.Parameter) -> Parameter:
    kind, info = _kind_and_info(parameter.annotation)
    flags = _flags(name, info) if isinstance(info, OptionInfo) else ()
    base, many = _base(kind)
    choices = tuple(str(member.value) for member in base) if issubclass(base, Enum) else ()
    switch = bool(flags) and (base is bool or bool(getattr(info, "count", False)))
    default = parameter.default
    return Parameter(
        name=name,
        flags=flags,
        metavar="" if switch else info.metavar or "|".join(choices) or name.upper(),
        help=info.help or "",
        choices=choices,
        many=many or bool(getattr(info, "count", False)),
        required=default is inspect.Parameter.empty,
        default="" if switch or not info.show_default else _word(default),
    )


def _flags(name: str, info: OptionInfo) -> tuple[str, ...]:
    """All ways to write an option; one that can be turned off (``--redact/--no-redact``) has both."""
    # in Annotated the first flag stands where the default value is otherwise
    first = (info.default,) if isinstance(info.default, str) else ()
    declared = (*first, *(info.param_decls or ())) or (f"--{name.replace('_', '-')}",)
    return tuple(flag for words in declared for flag in words.split("/"))


def _kind_and_info(annotation: Any) -> tuple[Any, OptionInfo | ArgumentInfo]:
    kind, *rest = typing.get_args(annotation)
    info = next(one for one in rest if isinstance(one, OptionInfo | ArgumentInfo))
    return kind, info


def _base(kind: Any) -> tuple[type, bool]:
    """The plain type behind ``list[X] | None``, and whether it is a list."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) in (list, tuple):
        return typing.get_args(kind)[0], True
    return kind, False


def _word(default: Any) -> str:
    if default is None or default is inspect.Parameter.empty or default is False:
        return ""
    return str(default.value) if isinstance(default, Enum) else str(default)


def flags_of(parameters: tuple[Parameter, ...]) -> Mapping[str, Parameter]:
    """Flag -> its option."""
    return {flag: parameter for parameter in parameters for flag in parameter.flags}

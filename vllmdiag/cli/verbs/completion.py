"""`vllmdiag completion`: what makes a shell complete its command lines."""

from __future__ import annotations

from enum import Enum
from importlib import resources
from typing import Annotated

import typer

from vllmdiag.cli.output import Output
from vllmdiag.model.errors import ExitCode

EPILOG = """Examples:

\b
  vllmdiag completion bash > ~/.local/share/bash-completion/completions/vllmdiag
  vllmdiag completion zsh > ~/.zfunc/_vllmdiag        with ~/.zfunc in fpath
  vllmdiag completion fish > ~/.config/fish/completions/vllmdiag.fish
  source <(vllmdiag completion bash)                  for this shell alone

\b
pip install puts them under share/ of its environment, where a system-wide shell finds them without this."""


class Shell(str, Enum):
    """The shells there is something for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def run(shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")]) -> int:
    """Print the script; nothing is installed."""
    script = resources.files("vllmdiag.cli").joinpath(f"completions/vllmdiag.{shell.value}")
    Output().write(script.read_text(encoding="utf-8"))
    return ExitCode.OK

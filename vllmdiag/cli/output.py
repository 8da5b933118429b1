"""Where the product goes, in which dress, and where progress goes: stdout holds the product, stderr everything else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllmdiag.model.errors import NotPermittedError, UsageError
from vllmdiag.render.page import Style


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Destination and dress of the product."""

    file: Path | None = None
    """None: stdout."""
    color: str = "auto"
    ascii: bool = False
    verbose: int = 0

    @property
    def style(self) -> Style:
        """How text is written here: only a terminal has a width, and NO_COLOR rules unless --color says otherwise."""
        terminal = self.file is None and sys.stdout.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return Style(
            width=max(40, shutil.get_terminal_size().columns) if terminal else None,
            colour=self.color == "always" or (self.color == "auto" and terminal and not plain),
            ascii=self.ascii or not self._speaks_unicode(),
            verbose=self.verbose,
        )

    def write(self, text: str) -> None:
        """Write the whole product.

        Raises:
            NotPermittedError, UsageError: the file cannot be written.
        """
        if self.file is None:
            _write_stdout(text)
            return
        try:
            self.file.write_text(text, encoding="utf-8")
        except PermissionError as error:
            raise NotPermittedError(
                f"cannot write {self.file}", why=str(error.strerror), next="--output FILE"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot write {self.file}", why=str(error.strerror), next="--output FILE") from None

    def _speaks_unicode(self) -> bool:
        return self.file is not None or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _write_stdout(text: str) -> None:
    """Write and flush. A reader that has gone (head) changes nothing about the exit code of the verb."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Send stdout to nowhere after its reader has gone: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(verbose: int) -> Callable[[str], None]:
    """What a collector calls to say what it does: one line that replaces itself on a terminal, whole lines with -v.

    Off a terminal and without -v nothing is written: stderr is then for errors and hints.
    """
    if verbose:
        return lambda step: print(f"vllmdiag: {step}", file=sys.stderr) if step else None
    if not sys.stderr.isatty():
        return lambda _step: None
    return lambda step: print(f"\r\x1b[K{step}", end="", file=sys.stderr, flush=True)

"""The console entry: runs a verb, and turns whatever happens into an exit code and an error that teaches.

Kept light: `vllmdiag --version` is asked by scripts and probes, so it is answered before anything big is imported.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Sequence

from vllmdiag import __version__, version_text
from vllmdiag.cli import interrupt
from vllmdiag.model.errors import ExitCode, UsageError, VllmdiagError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        The exit code (see `ExitCode`); nothing but the requested product is written to stdout.
    """
    if argv is None:  # this process is ours and ends with us: looking through it for garbage would take 25 ms
        atexit.register(gc.freeze)
        interrupt.install()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args == ["--version"]:
            print(version_text(), flush=True)
            return ExitCode.OK
        if "VLLMDIAG_COMPLETE" in os.environ:
            from vllmdiag.cli.completion import answer

            return answer(args)
        return _run(args)
    except VllmdiagError as error:
        _explain(error)
        return error.exit_code
    except KeyboardInterrupt:
        interrupt.settle()
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        from vllmdiag.cli.output import silence_stdout

        silence_stdout()
        return ExitCode.OK
    except Exception as error:  # noqa: BLE001 (the last line of defence: a bug is reported, never thrown at the user)
        if os.environ.get("VLLMDIAG_DEBUG") == "1":
            traceback.print_exc()
        _explain(_bug(error))
        return ExitCode.BUG


def _run(args: list[str]) -> int:
    from typer import Abort, TyperException

    from vllmdiag.cli.app import build

    app, words = build(args)
    try:
        code = app(words, prog_name="vllmdiag", standalone_mode=False)
    except TyperException as error:
        raise _usage(error) from None
    except Abort:
        interrupt.settle()
        return ExitCode.INTERRUPTED
    except SystemExit as stop:
        # typer exits with 1 when the reader of a help text has gone, and with its own code after shell completion
        return ExitCode.OK if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    return int(code or 0)


def _usage(error: Exception) -> UsageError:
    """A usage error in the form of all others, pointing at the help of the verb in question."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "vllmdiag"
    message = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
    return UsageError(message, why="the command line is not understood", next=f"{command} --help")


def _bug(error: Exception) -> VllmdiagError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "an unknown place"
    return VllmdiagError(
        f"bug in vllmdiag {__version__}: {type(error).__name__} at {place}",
        why=str(error) or "no message",
        next="please report it as an issue of vllmdiag, with what this prints: VLLMDIAG_DEBUG=1 vllmdiag ...",
    )


def _explain(error: VllmdiagError) -> None:
    """Write what, why, next to stderr; further lines of `next` are aligned under the first."""
    lines = [f"error: {error.what}"]
    for key, text in (("why:  ", error.why), ("next: ", error.next)):
        for i, line in enumerate(text.splitlines()):
            lines.append(f"  {key if i == 0 else ' ' * len(key)}{line}")
    print("\n".join(lines), file=sys.stderr)

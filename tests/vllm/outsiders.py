"""Somebody else at the keyboard: vllmdiag run by another user, or with fewer capabilities."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import sys

from tests.vllm.conftest import Answer
from vllmdiag.cli.main import main

NOBODY = 65534
PR_SET_DUMPABLE = 4
WITHOUT_PTRACE = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", sys.executable)


def as_nobody(*args: str | int) -> Answer:
    """The command line program in a fork that has given up every privilege: the checkout may be hidden from others."""
    words = [str(arg) for arg in args]
    _captured([*words[:1], "--help"])  # what is loaded late is loaded now
    _load()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            # A change of uid hides the process from itself, as if it had been executed set-uid.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(_captured(words), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return Answer(*pickle.loads(data))


def _load() -> None:
    from vllmdiag.diagnosis import judge, view  # noqa: F401
    from vllmdiag.sources import collect, viewer  # noqa: F401
    from vllmdiag.vllm.signatures import match

    match(())


def _captured(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()

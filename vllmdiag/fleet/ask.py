"""Asks many nodes at once: a child process for each, so many at a time, each with its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllmdiag.model.fleet import NodeReport, Outcome

from .wire import Answer

_CHUNK = 1 << 16
_KEPT_STDERR = 8 << 10
_NOT_FOUND = 127


@dataclass(frozen=True)
class Errand:
    """One node to ask."""

    node: str
    argv: tuple[str, ...]
    """Here: a program that passes the far end's stdout on as its own."""
    stdin: bytes = b""
    """What it reads: the program to run there, or nothing."""


def ask(
    errands: Sequence[Errand], deadline_s: float, at_once: int, done: Callable[[NodeReport], None]
) -> tuple[NodeReport, ...]:
    """Ask all; in the order of `errands`.

    Args:
        errands: one for each node.
        deadline_s: for each node, from when its turn comes.
        at_once: most children at a time.
        done: called with each report as it comes.
    """
    return asyncio.run(_ask_all(errands, deadline_s, at_once, done))


async def _ask_all(
    errands: Sequence[Errand], deadline_s: float, at_once: int, done: Callable[[NodeReport], None]
) -> tuple[NodeReport, ...]:
    turns = asyncio.Semaphore(at_once)

    async def one(errand: Errand) -> NodeReport:
        async with turns:
            report = await _ask(errand, deadline_s)
        done(report)
        return report

    return tuple(await asyncio.gather(*map(one, errands)))


async def _ask(errand: Errand, deadline_s: float) -> NodeReport:
    began = time.monotonic()
    answer = Answer(errand.node, time.time())

    def report(problem: str = "", outcome: Outcome | None = None) -> NodeReport:
        return answer.report(time.monotonic() - began, problem, outcome)

    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            *errand.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        return report(f"{errand.argv[0]}: {error.strerror}", "refused")
    errors = bytearray()

    async def whole() -> int:
        await asyncio.gather(_hear(child, answer), _hear_errors(child, errors), _tell(child, errand.stdin))
        return await child.wait()

    try:
        code = await asyncio.wait_for(whole(), deadline_s)
    except asyncio.TimeoutError:
        heard = "it greeted and did not finish" if answer.hello is not None else "no answer"
        return report(f"{heard} within {deadline_s:g} s", "silent")
    finally:
        await _end(child)
    return report(failure(code, errors.decode("utf-8", "replace")), "refused") if code else report()


async def _hear(child: asyncio.subprocess.Process, answer: Answer) -> None:
    assert child.stdout is not None  # noqa: S101  it was asked for above
    while data := await child.stdout.read(_CHUNK):
        if not answer.feed(data, time.time()):
            _kill(child)
            return


async def _hear_errors(child: asyncio.subprocess.Process, errors: bytearray) -> None:
    assert child.stderr is not None  # noqa: S101
    while data := await child.stderr.read(_CHUNK):
        errors.extend(data)
        del errors[:-_KEPT_STDERR]


async def _tell(child: asyncio.subprocess.Process, data: bytes) -> None:
    assert child.stdin is not None  # noqa: S101
    with contextlib.suppress(ConnectionError):
        child.stdin.write(data)
        await child.stdin.drain()
    child.stdin.close()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Nothing of it is left, whatever became of it."""
    if child.returncode is None:
        _kill(child)
        await child.wait()


def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def failure(code: int, errors: str) -> str:
    """Why a node could not be asked, by the exit code and the last words of its transport."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1][:200] if lines else ""
    if code == _NOT_FOUND or "executable file not found" in errors:
        return "vllmdiag is not installed there (or --remote-command is wrong): --ship FILE sends it"
    return f"exit code {code}: {last}" if last else f"exit code {code}"

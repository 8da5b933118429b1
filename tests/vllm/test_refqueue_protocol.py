"""Our queue is the real protocol: vLLM's readers understand our writer, and our readers understand vLLM's.

Each end is a process of its own. Two readers share the ring and one reads by TCP. Twice the writer pauses for so long
that the readers go to sleep; up to 0.28 they look at nothing until they are pinged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.inside.queue_peer import digest, messages
from tests.vllm.setup_vllm import Installation
from tests.vllm.wheels import shm_broadcast

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / "tests" / "vllm" / "inside" / "queue_peer.py"
LOCAL, REMOTE = 2, 1


class Kind(NamedTuple):
    """Whose queue, and which interpreter runs it."""

    python: str
    which: str


OURS = Kind(sys.executable, "ours")


class Peer:
    """One process with one end."""

    def __init__(self, kind: Kind, **job: Any) -> None:
        pipe = subprocess.PIPE
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": job["directory"]}
        command = [kind.python, str(PEER), kind.which]
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.say(job)

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(self.process.stderr.read())
        return json.loads(line)


@contextmanager
def peer(kind: Kind, **job: Any) -> Iterator[Peer]:
    """Started, and ended at the latest when it is left."""
    made = Peer(kind, **job)
    with made.process:
        try:
            yield made
        except BaseException:
            made.process.kill()
            raise


def exchange(writer: Kind, reader: Kind, version: str) -> tuple[list[str], list[list[str]]]:
    """What the writer sent and what each reader got."""
    with ExitStack() as stack:
        # vLLM leaves the files of its sockets behind
        common = {"version": version, "directory": stack.enter_context(tempfile.TemporaryDirectory())}
        writing = stack.enter_context(peer(writer, write=[LOCAL + REMOTE, LOCAL], **common))
        handle = writing.answer()
        reading = [
            stack.enter_context(peer(reader, read=handle, rank=rank, **common)) for rank in range(LOCAL + REMOTE)
        ]
        got = [each.answer() for each in reading]
        writing.say("done")
        return writing.answer(), got


@pytest.fixture(params=["0.10.2", "0.11.2", "0.18.1", "installed"])
def theirs(request: pytest.FixtureRequest) -> tuple[Kind, str]:
    """A vLLM queue, and its version."""
    if request.param == "installed":
        installation: Installation = request.getfixturevalue("installation")
        return Kind(str(installation.python), "installed"), installation.version
    return Kind(sys.executable, str(shm_broadcast(request.param))), request.param


@pytest.mark.parametrize("we_write", [True, False], ids=["our writer", "our readers"])
def test_messages_go_from_one_kind_of_queue_to_the_other(theirs: tuple[Kind, str], we_write: bool) -> None:
    kind, version = theirs
    sent, got = exchange(*((OURS, kind) if we_write else (kind, OURS)), version)
    assert sent == [digest(message) for message in messages()]
    assert got == [sent] * (LOCAL + REMOTE)

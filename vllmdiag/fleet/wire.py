"""What a node answers: JSON lines on its stdout, the greeting first, one line for each instance, and the end.

Fields that a later version adds are passed over, so nodes with other versions of vllmdiag are understood.
"""

from __future__ import annotations

import io

import msgspec

from vllmdiag.bundle.archive import is_bundle, read_bundle
from vllmdiag.model.errors import BadDataError
from vllmdiag.model.fleet import NodeReport, Outcome
from vllmdiag.model.snapshot import Snapshot

NODE_SCHEMA = "vllmdiag.node/1"
MAX_BYTES = 256 << 20
"""More than this no node may answer."""
_CHATTER = 64 << 10
"""So much may stand before the greeting: what the start files of a shell print."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Written before anything is looked at."""

    schema: str = NODE_SCHEMA
    tool: str = ""
    clock: float = 0.0
    """Seconds since the epoch on that node, when it was written."""
    instances: int = 0


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag="seen"):
    """One instance."""

    pid: int
    snapshot: Snapshot | None = None
    problem: str = ""
    """Why there is no snapshot."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Nothing follows: what was sent is complete."""


GREETING = b'{"type":"hello"'
"""How an answer begins."""

Line = Hello | Seen | End
_DECODER = msgspec.json.Decoder(Line)
_ENCODER = msgspec.json.Encoder()


def encode(line: Line) -> bytes:
    """One line, with its end."""
    return _ENCODER.encode(line) + b"\n"


class Answer:
    """Takes the bytes of one node as they come, and says at the end what they were.

    Args:
        node: name of the node.
        asked: when it was asked, seconds since the epoch on our clock.
    """

    def __init__(self, node: str, asked: float) -> None:
        self.node = node
        self.asked = asked
        self.size = 0
        self.hello: Hello | None = None
        self._heard = 0.0
        self._open = bytearray()
        self._snapshots: list[Snapshot] = []
        self._problems: list[str] = []
        self._ended = False
        self._garbage = ""

    def feed(self, data: bytes, now: float) -> bool:
        """Take some bytes; `now` is our clock. False where nothing more need be read: it is no answer."""
        self.size += len(data)
        if self.size > MAX_BYTES:
            self._garbage = f"more than {MAX_BYTES >> 20} MiB came"
        if self._garbage:
            return False
        self._open += data
        if self.hello is None and is_bundle(bytes(self._open[:512])):
            return True  # read as a whole at the end
        if b"\n" in data:
            *lines, self._open = self._open.split(b"\n")
            for line in lines:
                self._line(bytes(line), now)
        if self.hello is None and self.size > _CHATTER:
            self._garbage = "what came is no answer of vllmdiag"
        return not self._garbage

    def report(self, took_s: float, problem: str = "", outcome: Outcome | None = None) -> NodeReport:
        """What it was.

        Args:
            took_s: seconds from asking to the end.
            problem: what the transport says, where it failed.
            outcome: ``silent`` or ``refused`` where the transport failed; None where it ended well.
        """
        self._bundle()
        skew = None if self.hello is None or not self.hello.clock else self.hello.clock - (self.asked + self._heard) / 2
        missing = self.hello.instances - len(self._snapshots) if self.hello is not None else 0
        if self._garbage:
            outcome, problem = "garbage", self._garbage
        elif self._snapshots:
            cut = f"{missing} of {self.hello.instances} instances are missing" if missing > 0 and self.hello else ""
            problem = ", ".join(p for p in (cut, *self._problems, problem if missing > 0 else "") if p)
            outcome = "answered"
        elif self._ended and not missing:
            outcome, problem = "empty", ""
        elif self._problems:
            outcome, problem = "refused", ", ".join(self._problems)
        elif not outcome:
            outcome = "garbage"
            problem = problem or ("it was cut off" if self.size else "it said nothing at all")
        return NodeReport(
            node=self.node,
            outcome=outcome,
            snapshots=tuple(self._snapshots),
            problem=problem,
            tool=self.hello.tool if self.hello is not None else "",
            took_s=round(took_s, 3),
            skew_s=None if skew is None else round(skew, 3),
            skew_within_s=None if skew is None else round((self._heard - self.asked) / 2, 3),
        )

    def _line(self, line: bytes, now: float) -> None:
        if not line.strip() or (self.hello is None and not line.startswith(b"{")):
            return
        try:
            said = _DECODER.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            self._garbage = f"what came is no answer of vllmdiag: {error}"[:200]
            return
        if isinstance(said, Hello):
            self._greet(said, now)
        elif isinstance(said, End):
            self._ended = True
        elif said.snapshot is not None:
            self._snapshots.append(said.snapshot)
        else:
            self._problems.append(f"instance of pid {said.pid}: {said.problem}")

    def _greet(self, hello: Hello, now: float) -> None:
        name, _, major = hello.schema.partition("/")
        if (name, major.partition(".")[0]) != tuple(NODE_SCHEMA.split("/")):
            self._garbage = f"it speaks {hello.schema} (vllmdiag {hello.tool}), not {NODE_SCHEMA}"
            return
        self.hello, self._heard = hello, now

    def _bundle(self) -> None:
        """What came is an archive of `capture`, or one snapshot, whole."""
        if self.hello is not None or not self._open or self._garbage:
            return
        try:
            bundle = read_bundle(io.BytesIO(self._open))
        except BadDataError as error:
            if is_bundle(bytes(self._open[:512])):
                self._garbage = error.why or error.what
            return
        self._snapshots.append(bundle.snapshot)
        self.hello = Hello(tool=bundle.snapshot.tool, instances=1)

"""The account of copies: one request on its way to the scheduler, and one step of an executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllmdiag.model.ledger import Entry, Ledger, Load, Where
from vllmdiag.model.plan import Topology
from vllmdiag.vllm.layouts import shape
from vllmdiag.vllm.ledger import LedgerTable, ledger_table
from vllmdiag.vllm.versions import in_range

from .topology import Placement, settle

_SOCKET = 2
"""Into the kernel and out of it."""


def ledger(asked: Topology, load: Load) -> Ledger:
    """Account for one request and one step. Raises UsageError where the topology cannot be started."""
    placed = settle(asked)
    account = _Account(placed, load)
    request, step = tuple(account.request()), tuple(account.step())
    sums = Counter[str]()
    for entry in step:
        sums[entry.where] += entry.total
    return Ledger(
        topology=placed.topology,
        load=load,
        request=request,
        step=step,
        request_bytes=sum(e.total for e in request),
        step_bytes=sum(e.total for e in step),
        sums=dict(sums),
        notes=tuple(account.notes()),
        sources=tuple(s.source + (" (estimate)" if s.estimate else "") for s in ledger_table().sizes),
    )


class _Account:
    def __init__(self, placed: Placement, load: Load) -> None:
        self.placed, self.load, self.top = placed, load, placed.topology
        self.table: LedgerTable = ledger_table()
        self.spread = placed.nodes_per_job > placed.nodes_per_engine
        self.local = placed.local_world if self.top.executor == "mp" else 0
        self.remote = self.top.world - placed.local_world if self.top.executor == "mp" else 0

    @property
    def over(self) -> Where:
        """What lies between API servers and engines."""
        return "network" if self.spread else "kernel"

    @property
    def slot(self) -> int:
        """Bytes of a slot of the broadcast ring."""
        return shape("broadcast", max(1, self.local), self.top.version, self.top.chunk_mib).chunk_bytes

    @property
    def pickled_tensor(self) -> bool:
        """The array becomes part of the pickle."""
        small = self.load.tensor_bytes < self.table.out_of_band_from
        return small or not in_range(self.top.version, self.table.out_of_band_since, None)

    # -- to the scheduler ---------------------------------------------------------------------------------------------

    def request(self) -> Iterator[Entry]:
        """Once for each request."""
        load, size = self.load, self.table.size
        body = load.prompt_bytes + load.tensor_bytes * 4 // 3
        yield Entry(
            stage="client", what="body of the POST", by="client, API server", where="network", bytes=body, times=2
        )
        yield Entry(stage="API queue", what="JSON parsed", by="API server", where="user", bytes=body)
        if load.tensor_bytes:
            yield Entry(
                stage="API queue", what="base 64 decoded", by="API server", where="user", bytes=load.tensor_bytes
            )
        tokens = load.prompt_tokens * size("token_id")
        yield Entry(stage="API queue", what="tokens of the text", by="API server", where="user", bytes=tokens)
        message = size("request") + load.prompt_tokens * size("request_token")
        yield Entry(stage="input", what="request encoded (msgpack)", by="API server", where="user", bytes=message)
        whole = message + load.tensor_bytes
        yield Entry(stage="input", what="request sent", by="ZMQ threads", where=self.over, bytes=whole, times=_SOCKET)
        yield Entry(stage="input", what="request decoded", by="EngineCore input thread", where="user", bytes=message)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> Iterator[Entry]:
        """Of decoding requests."""
        load, size = self.load, self.table.size
        command = size("step") + (load.batch - 1) * size("step_request")
        reply = size("reply") + (load.batch - 1) * size("reply_request")
        if self.top.executor == "mp":
            yield from self._command("execute_model", command)
            yield from self._command("sample_tokens", size("sample"))
        ranks = self.top.world
        ids = load.batch * size("token_id")
        yield Entry(
            stage="compute", what="inputs to the device", by="each rank", where="device", bytes=ids, times=ranks
        )
        yield Entry(stage="compute", what="sampled tokens back", by="output rank", where="device", bytes=ids)
        if self.top.executor == "mp":
            yield from self._reply(reply)
        yield from self._outputs()

    def _command(self, name: str, pickled: int) -> Iterator[Entry]:
        yield Entry(
            stage="ring",
            what=f"{name} pickled, and taken out of its buffer",
            by="EngineCore",
            where="user",
            bytes=pickled,
            times=2,
        )
        yield Entry(stage="ring", what=f"{name} into the slot", by="EngineCore", where="shared", bytes=pickled)
        yield Entry(
            stage="ring",
            what=f"{name} read by each local rank",
            by="workers",
            where="shared",
            bytes=pickled,
            times=self.local,
        )
        if self.remote:
            yield Entry(
                stage="ring",
                what=f"{name} to each remote rank",
                by="ZMQ threads",
                where="network",
                bytes=pickled,
                times=_SOCKET * self.remote,
            )

    def first_step(self) -> int:
        """Bytes of the command that carries the prompt."""
        tensor = self.load.tensor_bytes
        return self.table.size("step") + self.load.prompt_tokens * self.table.size("step_token") + tensor

    def _reply(self, pickled: int) -> Iterator[Entry]:
        yield Entry(
            stage="reply",
            what="result pickled, and taken out of its buffer",
            by="output rank",
            where="user",
            bytes=pickled,
            times=2,
        )
        # The last stage answers; with several nodes it is on the last one.
        if self.remote and self.top.pp > 1:
            yield Entry(
                stage="reply", what="result sent", by="ZMQ threads", where="network", bytes=pickled, times=_SOCKET
            )
        else:
            yield Entry(stage="reply", what="result into its slot", by="output rank", where="shared", bytes=pickled)
            yield Entry(stage="reply", what="result read", by="EngineCore", where="shared", bytes=pickled)

    def _outputs(self) -> Iterator[Entry]:
        load, size = self.load, self.table.size
        outputs = load.batch * size("output")
        yield Entry(stage="output", what="outputs encoded", by="EngineCore output thread", where="user", bytes=outputs)
        yield Entry(
            stage="output", what="outputs sent", by="ZMQ threads", where=self.over, bytes=outputs, times=_SOCKET
        )
        yield Entry(stage="output", what="outputs decoded", by="API server", where="user", bytes=outputs)
        text = load.batch * size("chunk")
        yield Entry(stage="client", what="chunk of the stream built", by="API server", where="user", bytes=text)
        yield Entry(
            stage="client", what="chunk sent", by="API server, client", where="network", bytes=text, times=_SOCKET
        )

    def notes(self) -> Iterator[str]:
        """What the size of the payload changes."""
        first = self.first_step()
        if self.top.executor != "mp":
            yield f"executor {self.top.executor}: no ring of vLLM carries commands and replies"
            return
        if first >= self.slot:
            times = _SOCKET * self.local
            yield (
                f"the first step ({first} bytes) does not fit a slot ({self.slot}): it goes over the socket,"
                f" {times} copies in the kernel instead of one into shared memory"
            )
        else:
            yield f"the first step carries the prompt: {first} bytes of a slot of {self.slot}"
        if self.load.tensor_bytes and self.pickled_tensor:
            yield "the array is smaller than 1 MiB (or vLLM older than 0.11): it is copied into the pickle first"
        elif self.load.tensor_bytes:
            yield f"the array goes beside the pickle: a copy into the slot, one out for each of {self.local} readers"
        if self.remote:
            yield f"{self.remote} ranks on other nodes get every command over TCP, one after the other"

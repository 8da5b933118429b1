"""The API server's end of the engines: requests out by ROUTER, outputs in by PULL."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import os
import threading
import uuid
from array import array
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import zmq
import zmq.asyncio

from vllmdiag.lab import switches
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.v1.figures import Figures
from vllmdiag.lab.vllm.v1.serial_utils import EngineCoreRequestType, MsgpackDecoder, MsgpackEncoder

_ENGINE_READY_TIMEOUT_MS = 600_000

Output = dict[str, Any]


class MPClient:
    """The sockets, and the wait for every engine to report on them.

    Args:
        index: of this API server.
        input_address: where it binds for requests.
        output_address: where it binds for outputs.
    """

    def __init__(self, index: int, input_address: str, output_address: str) -> None:
        self.index = index
        self.context = zmq.asyncio.Context()
        self.input_socket = self._bind(zmq.ROUTER, input_address)
        self.output_socket = self._bind(zmq.PULL, output_address)
        self.engines: list[bytes] = []
        self.closing = False
        """The engines are being ended on purpose."""

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(envs.HWM)
        socket.bind(address)
        return socket


class AsyncMPClient(MPClient):
    """The same, for asyncio."""

    def __init__(self, index: int, input_address: str, output_address: str, figures: Figures) -> None:
        super().__init__(index, input_address, output_address)
        self.figures = figures
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder()
        self._outputs: dict[str, asyncio.Queue[Output]] = {}
        self._next = 0
        self._task: asyncio.Task[None] | None = None

    def wait_for_engines(self, n: int) -> None:
        """Wait until each engine has sent its first message on the input socket."""
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket.underlying)
        while len(self.engines) < n:
            if not socket.poll(_ENGINE_READY_TIMEOUT_MS):
                raise TimeoutError("Timed out waiting for engines to send initial message on input socket.")
            self.engines.append(socket.recv_multipart()[0])
        self.engines.sort()

    def monitor_engine_cores(self, processes: Sequence[BaseProcess]) -> None:
        """End this server when an engine has ended."""

        def monitor_engine_cores() -> None:
            multiprocessing.connection.wait([process.sentinel for process in processes])
            if not self.closing:
                os._exit(1)

        threading.Thread(target=monitor_engine_cores, daemon=True, name="MPClientEngineMonitor").start()

    def start(self) -> None:
        """Begin to take outputs; needs a running loop."""
        self._task = asyncio.create_task(self.process_outputs_socket())

    async def process_outputs_socket(self) -> None:
        """Hand each output to the request that waits for it."""
        while not switches.is_on("outputs-not-read"):
            output: Output = self._decoder.decode(await self.output_socket.recv_multipart())
            if "utility" in output:
                self._give(output["utility"], output)
                continue
            engine = output["engine"]
            self.figures.add("generated", engine, len(output["tokens"]))
            self.figures.add("finished", engine, len(output["finished"]))
            self.figures.add("running", engine, -len(output["finished"]))
            for request, token in output["tokens"].items():
                self._give(request, {"token": token, "finished": request in output["finished"]})
        switches.entered("outputs-not-read")

    def _give(self, request: str, output: Output) -> None:
        if request in self._outputs:
            self._outputs[request].put_nowait(output)

    async def add_request(self, prompt: str, max_tokens: int) -> tuple[str, int, asyncio.Queue[Output]]:
        """Send a request to the next engine in turn.

        Returns:
            (its id, the engine, the queue of its outputs)
        """
        engine = self._next % len(self.engines)
        self._next += 1
        request = f"cmpl-{uuid.uuid4().hex}"
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._outputs[request] = queue
        self.figures.add("running", engine, 1)
        tokens = array("i", list(prompt.encode()))
        body = {"id": request, "client": self.index, "max_tokens": max_tokens, "prompt_token_ids": tokens}
        await self._send(engine, EngineCoreRequestType.ADD, body)
        return request, engine, queue

    async def abort(self, request: str, engine: int) -> None:
        """Give a request up."""
        del self._outputs[request]
        self.figures.add("running", engine, -1)
        await self._send(engine, EngineCoreRequestType.ABORT, {"id": request})

    def forget(self, request: str) -> None:
        """A request is complete."""
        self._outputs.pop(request, None)

    async def collective_rpc(self, method: str, args: list[Any], timeout: float | None) -> list[Any]:
        """Call a method of every worker of every engine. Raises RuntimeError with the words of an engine."""
        results = []
        for engine in range(len(self.engines)):
            call = uuid.uuid4().hex
            queue: asyncio.Queue[Output] = asyncio.Queue()
            self._outputs[call] = queue
            body = {"id": call, "client": self.index, "method": method, "args": args, "timeout": timeout}
            await self._send(engine, EngineCoreRequestType.UTILITY, body)
            answer = await queue.get()
            del self._outputs[call]
            if "error" in answer:
                raise RuntimeError(answer["error"])
            results += answer["result"]
        return results

    async def _send(self, engine: int, kind: bytes, body: dict[str, Any]) -> None:
        await self.input_socket.send_multipart([self.engines[engine], kind, *self._encoder.encode(body)])

"""HTTP: /health, /version, /metrics, /v1/completions (streaming) and /collective_rpc."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from asyncio import StreamReader, StreamWriter
from typing import Any

import zmq

from vllmdiag.lab import switches
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.v1.engine.core_client import AsyncMPClient
from vllmdiag.lab.vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines
from vllmdiag.lab.vllm.v1.figures import Figures
from vllmdiag.lab.vllm.v1.utils import ServerPlace

_BACKLOG = 2048
_KV_BLOCKS = 256
"""Blocks of the cache; each request that runs holds one."""
_REASONS = {200: "OK", 404: "Not Found", 500: "Internal Server Error"}
_CHUNK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def create_server_socket(port: int) -> socket.socket:
    """Bind the HTTP port, before anything else is started. With SO_REUSEPORT, as vLLM does."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


def run_server(config: VllmConfig) -> None:
    """One API server that is the parent of its engine."""
    listener = create_server_socket(config.port)
    addresses = EngineZmqAddresses(inputs=[envs.ipc_path()], outputs=[envs.ipc_path()])
    figures = Figures([0] * Figures.size(1, 1), 0, 1, 1)
    client = AsyncMPClient(0, addresses.inputs[0], addresses.outputs[0], figures)
    with launch_core_engines(config, addresses) as engines:
        pass
    try:
        client.wait_for_engines(len(engines.processes))
        client.monitor_engine_cores(engines.processes)
        asyncio.run(_Server(client, listener).serve())
    finally:
        client.closing = True
        engines.close()


def run_server_worker(config: VllmConfig, listener: socket.socket, place: ServerPlace) -> None:
    """One API server of several."""
    n = config.data_parallel_size
    client = AsyncMPClient(
        place.index, place.input_address, place.output_address, Figures(place.figures, place.index, n, n)
    )
    news = client.context.socket(zmq.XSUB)
    news.connect(place.front_publish)
    zmq.Socket.shadow(news.underlying).send(b"\x01")
    client.wait_for_engines(n)
    asyncio.run(_Server(client, listener).serve())


class _Server:
    """The event loop's part."""

    def __init__(self, client: AsyncMPClient, listener: socket.socket) -> None:
        self.client, self._listener = client, listener

    async def serve(self) -> None:
        """Answer until SIGTERM."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        self.client.start()
        server = await asyncio.start_server(self._connection, sock=self._listener, backlog=_BACKLOG)
        await ended.wait()
        server.close()

    async def _connection(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        words = (await reader.readline()).split()
        length = 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(words) < 2:
            return
        path, body = words[1].decode(), await reader.readexactly(length)
        if path == "/v1/completions":
            await self._completion(json.loads(body), reader, writer)
        elif path == "/collective_rpc":
            await self._rpc(json.loads(body), writer)
        elif path in ("/health", "/version", "/metrics"):
            text = {"/health": "", "/version": json.dumps({"version": envs.VERSION}), "/metrics": self._metrics()}[path]
            await _reply(writer, 200, text)
        else:
            await _reply(writer, 404, "no such path")

    async def _completion(self, asked: dict[str, Any], reader: StreamReader, writer: StreamWriter) -> None:
        if switches.is_on("api-loop-blocked"):
            _apply_template()
        if switches.is_on("needs-a-thread"):
            await asyncio.to_thread(switches.entered, "needs-a-thread")
        stream, repeat = asked.get("stream", False), asked.get("repeat", 1)
        request, engine, outputs = await self.client.add_request(asked.get("prompt", ""), asked.get("max_tokens", 16))
        gone = asyncio.create_task(reader.read(1))
        try:
            await self._stream(outputs, writer, gone, stream, repeat)
        except ConnectionError:
            await self.client.abort(request, engine)
            raise
        finally:
            gone.cancel()
            self.client.forget(request)

    async def _stream(
        self,
        outputs: asyncio.Queue[dict[str, Any]],
        writer: StreamWriter,
        gone: asyncio.Task[bytes],
        stream: bool,
        repeat: int,
    ) -> None:
        """Send the tokens, each as it comes or all at the end. Raises ConnectionError when the client has gone."""
        if stream:
            writer.write(_CHUNK_HEAD)
        text, finished = "", False
        while not finished:
            taken = asyncio.ensure_future(outputs.get())
            notice = {gone} if not switches.is_on("client-gone-unnoticed") else set()
            await asyncio.wait({taken, *notice}, return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                taken.cancel()
                raise ConnectionResetError("the client has gone")
            output = taken.result()
            finished, text = output["finished"], text + output["token"]
            if stream:
                event = {"choices": [{"text": output["token"] * repeat}]}
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
        if stream:
            writer.write(b"data: [DONE]\n\n")
        else:
            usage = {"completion_tokens": len(text.split())}
            await _reply(writer, 200, json.dumps({"choices": [{"text": text}], "usage": usage}))

    async def _rpc(self, asked: dict[str, Any], writer: StreamWriter) -> None:
        try:
            results = await self.client.collective_rpc(asked["method"], asked.get("args", []), asked.get("timeout"))
        except RuntimeError as error:
            await _reply(writer, 500, str(error))
        else:
            await _reply(writer, 200, json.dumps({"results": results}))

    def _metrics(self) -> str:
        figures = self.client.figures
        running = figures.totals("running")
        families = (
            ("num_requests_running", "gauge", running),
            ("num_requests_waiting", "gauge", dict.fromkeys(running, 0)),
            ("kv_cache_usage_perc", "gauge", {engine: n / _KV_BLOCKS for engine, n in running.items()}),
            ("generation_tokens_total", "counter", figures.totals("generated")),
            ("request_success_total", "counter", figures.totals("finished")),
        )
        lines = []
        for name, kind, values in families:
            lines.append(f"# TYPE vllm:{name.removesuffix('_total')} {kind}")
            reason = ',finished_reason="length"' if name == "request_success_total" else ""
            lines += [f'vllm:{name}{{engine="{engine}"{reason}}} {value}' for engine, value in values.items()]
        return "\n".join(lines) + "\n"


def _apply_template() -> None:
    """A call that blocks the event loop, as a costly template or tokenizer does."""
    switches.sleep_while_on("api-loop-blocked")


async def _reply(writer: StreamWriter, status: int, body: str) -> None:
    data = body.encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()

"""EngineCore: the input thread, the loop, the output thread, and the handshake by which it joins its front end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from typing import Any

import msgspec
import zmq

from vllmdiag.lab import lifeline, switches
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.title import set_process_title
from vllmdiag.lab.vllm.v1.engine.utils import EngineZmqAddresses, SignalCallback
from vllmdiag.lab.vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllmdiag.lab.vllm.v1.serial_utils import EngineCoreRequestType, MsgpackDecoder, MsgpackEncoder
from vllmdiag.lab.vllm.v1.structured_output import StructuredOutputManager

_HANDSHAKE_TIMEOUT_MS = 5 * 60_000
_BALLAST = " " * 4096
"""Sent with each output while the switch ``large-outputs`` is on, so that what piles up shows."""

logger = logging.getLogger("vllm.v1.engine.core")


class Request(msgspec.Struct):
    """One completion that runs."""

    id: str
    client: int
    left: int
    """Tokens still to make."""


class EngineCore:
    """The requests, and one step over all of them."""

    def __init__(self, config: VllmConfig, on_failure: Any) -> None:
        self.model_executor = MultiprocExecutor(config, on_failure)
        self.requests: dict[str, Request] = {}
        self.structured_output_manager = StructuredOutputManager()

    def step(self) -> list[tuple[int, dict[str, Any]]]:
        """One token for every request.

        Returns:
            (client, output) for each client that has requests here.
        """
        future = self.model_executor.execute_model(list(self.requests))
        future.result()
        tokens = self.model_executor.sample_tokens()
        outputs: dict[int, dict[str, Any]] = {}
        for request_id, token in tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.left -= 1
            output = outputs.setdefault(request.client, {"tokens": {}, "finished": []})
            output["tokens"][request_id] = token
            if request.left <= 0:
                output["finished"].append(request_id)
                del self.requests[request_id]
        return list(outputs.items())


class EngineCoreProc(EngineCore):
    """EngineCore in its own process.

    Args:
        config: the arguments.
        dp_rank: which of the engines it is.
        handshake_address: where the front end waits for it.
    """

    def __init__(self, config: VllmConfig, dp_rank: int, handshake_address: str) -> None:
        self.dp_rank = dp_rank
        self.identity = dp_rank.to_bytes(2, "little")
        self.input_queue: queue.Queue[tuple[bytes, Any]] = queue.Queue()
        self.output_queue: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.shutting_down = False
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        handshake = self.context.socket(zmq.DEALER)
        handshake.setsockopt(zmq.IDENTITY, self.identity)
        handshake.connect(handshake_address)
        addresses = self.startup_handshake(handshake)
        super().__init__(config, self._executor_failed)
        ready = threading.Event()
        for target, args in (
            (self.process_input_sockets, (addresses, ready)),
            (self.process_output_sockets, (addresses,)),
        ):
            threading.Thread(target=target, args=args, daemon=True).start()
        ready.wait()
        handshake.send(msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False}))
        handshake.close()

    def startup_handshake(self, handshake: zmq.Socket[bytes]) -> EngineZmqAddresses:
        """Say HELLO, and wait for the addresses."""
        handshake.send(msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False}))
        if not handshake.poll(_HANDSHAKE_TIMEOUT_MS):
            raise RuntimeError("Did not receive response from front-end process within 5 minutes")
        return msgspec.msgpack.decode(handshake.recv(), type=EngineZmqAddresses)

    @staticmethod
    def run_engine_core(config: VllmConfig, dp_rank: int, handshake_address: str) -> None:
        """The life of the process."""
        lifeline.hang_on()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_process_title("EngineCore", f"DP{dp_rank}" if config.data_parallel_size > 1 else "")
        engine = EngineCoreProc(config, dp_rank, handshake_address)
        callback = SignalCallback(engine.wake_to_shut_down)
        signal.signal(signal.SIGTERM, lambda *_: callback.trigger())
        try:
            engine.run_busy_loop()
        finally:
            engine.model_executor.shutdown()

    def wake_to_shut_down(self) -> None:
        """End the loop after its present step."""
        self.shutting_down = True
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _executor_failed(self) -> None:
        """A worker has died: so does the engine, in whatever it waits."""
        logger.error("EngineCore encountered a fatal error.")
        self.model_executor.shutdown()
        os._exit(1)

    def run_busy_loop(self) -> None:
        """Take what has come, make a step, for ever."""
        while not self.shutting_down:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        """Wait for input while there is nothing to do, then take all there is."""
        while not self.requests and not self.shutting_down:
            self._handle_client_request(*self.input_queue.get())
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())

    def _process_engine_step(self) -> None:
        if self.requests:
            for client, output in self.step():
                if switches.is_on("large-outputs"):
                    output["ballast"] = _BALLAST
                self.output_queue.put_nowait((client, output))

    def _handle_client_request(self, kind: bytes, body: Any) -> None:
        if kind == EngineCoreRequestType.ADD:
            if switches.is_on("grammar-busy"):
                self.structured_output_manager.grammar_init()
                return  # it waits for its grammar
            request = Request(id=body["id"], client=body["client"], left=body["max_tokens"])
            self.requests[request.id] = request
        elif kind == EngineCoreRequestType.ABORT:
            self.requests.pop(body["id"], None)
        elif kind == EngineCoreRequestType.UTILITY:
            self._invoke_utility_method(body)

    def _invoke_utility_method(self, body: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"utility": body["id"]}
        try:
            answer["result"] = self.collective_rpc(body["method"], tuple(body["args"]), body["timeout"])
        except (TimeoutError, RuntimeError) as error:
            answer["error"] = str(error)
        self.output_queue.put_nowait((body["client"], answer))

    def collective_rpc(self, method: str, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        """Call a method of every worker, and wait for all answers."""
        answers: list[Any] = self.model_executor.collective_rpc(method, args, timeout=timeout).result()
        return answers

    # --- threads

    def process_input_sockets(self, addresses: EngineZmqAddresses, ready: threading.Event) -> None:
        """Receive from every API server, and from the coordinator; decode; hand over to the loop."""
        decoder = MsgpackDecoder()
        poller = zmq.Poller()
        for address in addresses.inputs:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, self.identity)
            dealer.connect(address)
            dealer.send(b"")  # by this the ROUTER learns of us
            poller.register(dealer, zmq.POLLIN)
        if addresses.coordinator_input:
            waves = self._socket(zmq.XSUB)
            waves.connect(addresses.coordinator_input)
            waves.send(b"\x01")
            poller.register(waves, zmq.POLLIN)
        ready.set()
        while True:
            for socket, _ in poller.poll():
                self._receive(socket, decoder)
            if switches.is_on("endpoint-gone"):
                _reconnect(socket for socket, _ in poller.sockets)

    def _receive(self, socket: zmq.Socket[bytes], decoder: MsgpackDecoder) -> None:
        frames = socket.recv_multipart()
        if socket.type != zmq.DEALER:
            return  # a notice of the coordinator: dense engines do not step together
        if switches.is_on("input-thread-dead"):
            switches.entered("input-thread-dead")
            raise ValueError("a request that cannot be decoded")
        if switches.is_on("input-thread-stuck"):
            switches.spin_while_on("input-thread-stuck")
        self.input_queue.put_nowait((frames[0], decoder.decode(frames[1:])))

    def process_output_sockets(self, addresses: EngineZmqAddresses) -> None:
        """Send what the loop has made to the API server that asked for it."""
        encoder = MsgpackEncoder()
        sockets = [self._socket(zmq.PUSH) for _ in addresses.outputs]
        for socket, address in zip(sockets, addresses.outputs, strict=True):
            socket.connect(address)
        coordinator = self._socket(zmq.PUSH)
        if addresses.coordinator_output:
            coordinator.connect(addresses.coordinator_output)
        while True:
            client, output = self.output_queue.get()
            if switches.is_on("endpoint-gone"):
                _reconnect(sockets)
            output["engine"] = self.dp_rank
            sockets[client].send_multipart(encoder.encode(output))
            if addresses.coordinator_output:
                coordinator.send(msgspec.msgpack.encode({"engine": self.dp_rank, "running": len(self.requests)}))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(envs.HWM)
        return socket


def _reconnect(sockets: Any) -> None:
    """What a transport does that has lost its peer: connect again, by the same path."""
    for socket in sockets:
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        socket.disconnect(address)
        socket.connect(address)
    switches.entered("endpoint-gone")

"""The front end's side of starting engines: the processes, and the handshake with each."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq

from vllmdiag.lab import switches
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig

_ROUND_MS = 10_000
_EXIT_S = 3.0

logger = logging.getLogger("vllm.v1.engine.utils")


class EngineZmqAddresses(msgspec.Struct):
    """What an engine is told in the handshake."""

    inputs: list[str]
    """One per API server."""
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None


class SignalCallback:
    """Calls a function in a thread of its own when told to, so that a signal handler need not do it."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback, self._event = callback, threading.Event()
        threading.Thread(target=self._run, daemon=True, name="signal-callback").start()

    def _run(self) -> None:
        self._event.wait()
        self._callback()

    def trigger(self) -> None:
        """Call it."""
        self._event.set()


class CoreEngineProcManager:
    """The engine processes of this node."""

    def __init__(self, config: VllmConfig, handshake_address: str) -> None:
        from vllmdiag.lab.vllm.v1.engine.core import EngineCoreProc

        context = multiprocessing.get_context("spawn")
        self.processes = [
            context.Process(
                target=EngineCoreProc.run_engine_core,
                args=(config, rank, handshake_address),
                name=f"EngineCore_DP{rank}" if config.data_parallel_size > 1 else "EngineCore",
            )
            for rank in range(config.data_parallel_size)
        ]
        for process in self.processes:
            process.start()

    def close(self) -> None:
        """End them, by force where they do not end by themselves."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(_EXIT_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def launch_core_engines(config: VllmConfig, addresses: EngineZmqAddresses) -> Iterator[CoreEngineProcManager]:
    """Start the engines, let the caller start the rest, then wait until all engines are ready."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handshake = context.socket(zmq.ROUTER)
    address = envs.ipc_path()
    handshake.bind(address)
    manager = CoreEngineProcManager(config, address)
    try:
        yield manager
        wait_for_engine_startup(handshake, addresses, manager)
    except BaseException:
        manager.close()
        raise
    finally:
        handshake.close(linger=0)
        context.term()


def wait_for_engine_startup(
    handshake: zmq.Socket[bytes], addresses: EngineZmqAddresses, manager: CoreEngineProcManager
) -> None:
    """Answer each HELLO with the addresses, and return when every engine has said READY."""
    poller = zmq.Poller()
    poller.register(handshake, zmq.POLLIN)
    for process in manager.processes:
        poller.register(process.sentinel, zmq.POLLIN)
    ready = 0
    while ready < len(manager.processes):
        events = dict(poller.poll(_ROUND_MS))
        if not events:
            logger.debug("Waiting for %d local core engine proc(s) to start.", len(manager.processes) - ready)
            continue
        if set(events) - {handshake}:
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        identity, message = handshake.recv_multipart()
        status = msgspec.msgpack.decode(message)["status"]
        if status == "READY":
            ready += 1
        elif not switches.is_on("handshake-never-complete"):
            handshake.send_multipart([identity, msgspec.msgpack.encode(addresses)])

"""The coordinator of several engines: it takes their load figures and publishes them to the API servers."""

from __future__ import annotations

import multiprocessing
import signal

import msgspec
import zmq

from vllmdiag.lab import lifeline
from vllmdiag.lab.vllm.title import set_process_title

_PUBLISH_MS = 100


class DPCoordinator:
    """Its process, seen from the parent."""

    def __init__(self, front_publish: str, back_publish: str, back_output: str) -> None:
        self.process = multiprocessing.get_context("spawn").Process(
            target=DPCoordinatorProc.run_coordinator,
            args=(front_publish, back_publish, back_output),
            name="VLLM_DP_Coordinator",
            daemon=True,
        )
        self.process.start()


class DPCoordinatorProc:
    """The process itself."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}

    @staticmethod
    def run_coordinator(front_publish: str, back_publish: str, back_output: str) -> None:
        """The life of the process."""
        lifeline.hang_on()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_process_title("DPCoordinator")
        DPCoordinatorProc().process_input_socket(front_publish, back_publish, back_output)

    def process_input_socket(self, front_publish: str, back_publish: str, back_output: str) -> None:
        """Take figures, publish them when they have changed."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        front, back, outputs = context.socket(zmq.XPUB), context.socket(zmq.XPUB), context.socket(zmq.PULL)
        poller = zmq.Poller()
        for socket, address in ((front, front_publish), (back, back_publish), (outputs, back_output)):
            socket.bind(address)
            poller.register(socket, zmq.POLLIN)
        changed = False
        while True:
            events = dict(poller.poll(_PUBLISH_MS if changed else None))
            for socket in (front, back):
                if socket in events:
                    socket.recv()  # a subscription
            if outputs in events:
                figures = msgspec.msgpack.decode(outputs.recv())
                changed = self.running.get(figures["engine"]) != figures["running"]
                self.running[figures["engine"]] = figures["running"]
            elif changed:
                front.send(msgspec.msgpack.encode(self.running))
                changed = False

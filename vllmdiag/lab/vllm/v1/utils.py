"""The parent of several API servers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from vllmdiag.lab import lifeline
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.title import set_process_title
from vllmdiag.lab.vllm.v1.engine.utils import EngineZmqAddresses
from vllmdiag.lab.vllm.v1.figures import Figures


@dataclass(frozen=True)
class ServerPlace:
    """What one of several API servers is given."""

    index: int
    input_address: str
    output_address: str
    front_publish: str
    """Where the coordinator publishes."""
    figures: Any
    """Shared memory for `Figures`."""


class APIServerProcessManager:
    """Starts them; they share the socket that their parent listens on."""

    def __init__(
        self, config: VllmConfig, listener: socket.socket, addresses: EngineZmqAddresses, front_publish: str
    ) -> None:
        context = multiprocessing.get_context("spawn")
        n = len(addresses.inputs)
        figures = context.RawArray("q", Figures.size(n, config.data_parallel_size))
        places = [
            ServerPlace(index, addresses.inputs[index], addresses.outputs[index], front_publish, figures)
            for index in range(n)
        ]
        self.processes = [
            context.Process(
                target=run_api_server_worker_proc, args=(config, listener, place), name=f"ApiServer_{place.index}"
            )
            for place in places
        ]
        for process in self.processes:
            process.start()


def run_api_server_worker_proc(config: VllmConfig, listener: socket.socket, place: ServerPlace) -> None:
    """The life of one of several API servers."""
    from vllmdiag.lab.vllm.entrypoints.openai.api_server import run_server_worker

    lifeline.hang_on()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_title("APIServer", str(place.index))
    run_server_worker(config, listener, place)


def wait_for_completion_or_failure(processes: Sequence[BaseProcess]) -> None:
    """Return when any of the processes has ended."""
    waited: list[Any] = [process.sentinel for process in processes]
    multiprocessing.connection.wait(waited)

"""The three shapes of a server: one API server, several below a parent, and a node without any."""

from __future__ import annotations

import signal
import socket

from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.entrypoints.openai.api_server import create_server_socket, run_server
from vllmdiag.lab.vllm.v1.engine.coordinator import DPCoordinator
from vllmdiag.lab.vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines
from vllmdiag.lab.vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllmdiag.lab.vllm.v1.utils import APIServerProcessManager, wait_for_completion_or_failure


class ServeSubcommand:
    """``vllm serve``."""

    @staticmethod
    def cmd(config: VllmConfig) -> None:
        """Serve until told to stop."""
        if config.headless:
            run_headless(config)
        elif config.data_parallel_size > 1:
            run_multi_api_server(config)
        else:
            run_server(config)


def _exit_on_signal(*_: object) -> None:
    raise SystemExit


def run_headless(config: VllmConfig) -> None:
    """A node whose workers belong to an engine on another node."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    executor = MultiprocExecutor(config, lambda: None)
    try:
        wait_for_completion_or_failure([worker.process for worker in executor.workers])
    finally:
        executor.shutdown()


def run_multi_api_server(config: VllmConfig) -> None:
    """Several engines, as many API servers, a coordinator; this process only watches them."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    n = config.data_parallel_size
    listener: socket.socket = create_server_socket(config.port)
    front, back, figures = envs.ipc_path(), envs.ipc_path(), envs.ipc_path()
    coordinator = DPCoordinator(front, back, figures)
    addresses = EngineZmqAddresses(
        inputs=[envs.ipc_path() for _ in range(n)],
        outputs=[envs.ipc_path() for _ in range(n)],
        coordinator_input=back,
        coordinator_output=figures,
    )
    servers: APIServerProcessManager | None = None
    with launch_core_engines(config, addresses) as engines:
        servers = APIServerProcessManager(config, listener, addresses, front)
    try:
        wait_for_completion_or_failure([*servers.processes, *engines.processes, coordinator.process])
    finally:
        for process in servers.processes:
            process.terminate()
        engines.close()

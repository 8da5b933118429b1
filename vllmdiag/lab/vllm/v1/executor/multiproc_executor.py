"""EngineCore's side of its workers, and the worker's side: a ring down to all of them, a ring up from each."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from vllmdiag.lab import lifeline, switches
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.distributed.device_communicators.shm_broadcast import Cancelled, MessageQueue
from vllmdiag.lab.vllm.title import set_process_title
from vllmdiag.lab.vllm.v1.worker.gpu_worker import Worker

_BROADCAST_SLOT_BYTES = 16 << 20
_SLOT_BYTES, _SLOTS = 24 << 20, 10
_REMOTE_SLOT_BYTES, _REMOTE_SLOTS = 4 << 20, 6
_DEATH_GRACE_S = 20.0
"""From the death of a worker to the end of its engine. vLLM takes about 9 s."""
_EXIT_S = 1.0
_SLOW_READER_S = 0.1

logger = logging.getLogger("vllm.v1.executor.multiproc_executor")

_library_lock = threading.Lock()
"""A lock of the kind that tokenizers and loggers hold now and then. A forked child inherits it as it stands."""


class FutureWrapper:
    """An answer that is waited for later."""

    def __init__(self, get_response: Callable[[], Any]) -> None:
        self._get_response = get_response

    def result(self) -> Any:
        """Wait for it."""
        return self._get_response()


class _WorkerHandle(NamedTuple):
    process: BaseProcess
    ready: Connection
    death: Connection
    """Its closing tells the worker that the executor is gone."""
    rank: int


class MultiprocExecutor:
    """Starts the workers of this node. On the first node it also owns the broadcast ring and reads the responses.

    Args:
        config: the arguments.
        on_failure: called in the monitor thread when a worker has died.
    """

    def __init__(self, config: VllmConfig, on_failure: Callable[[], None]) -> None:
        self.config, self._on_failure = config, on_failure
        self.rpc_broadcast_mq: MessageQueue | None = None
        self.response_mqs: list[MessageQueue] = []
        self._ending = threading.Event()
        self._init_executor()

    def _init_executor(self) -> None:
        config, handle = self.config, None
        store = (config.master_addr, config.master_port) if config.nnodes > 1 else ("127.0.0.1", _free_port())
        if config.node_rank == 0:
            self.rpc_broadcast_mq = MessageQueue(
                config.world_size,
                config.local_world_size,
                max_chunk_bytes=_BROADCAST_SLOT_BYTES,
                connect_ip=envs.host_ip(),
            )
            handle = self.rpc_broadcast_mq.export_handle()
        method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        context = multiprocessing.get_context(method)
        with _lock_held_elsewhere() if switches.is_on("fork-with-lock-held") else nullcontext():
            self.workers = [
                WorkerProc.make_worker_process(context, config, rank, store, handle) for rank in config.local_ranks
            ]
        ready = WorkerProc.wait_for_ready(self.workers)
        threading.Thread(target=self.monitor_workers, daemon=True, name="MultiprocWorkerMonitor").start()
        if self.rpc_broadcast_mq is None:
            return
        handles = {rank: handle for message in ready for rank, handle in message.items()}
        self.response_mqs = [MessageQueue.create_from_handle(handles[rank], 0) for rank in range(config.world_size)]
        self.rpc_broadcast_mq.wait_until_ready()
        for queue in self.response_mqs:
            queue.wait_until_ready()

    def monitor_workers(self) -> None:
        """Wait for the death of a worker; when one has died, the engine follows after a while."""
        sentinels: dict[Any, _WorkerHandle] = {worker.process.sentinel: worker for worker in self.workers}
        died = multiprocessing.connection.wait(list(sentinels))
        if self._ending.is_set():
            return
        for sentinel in died:
            logger.error(
                "Worker proc VllmWorker-%d died unexpectedly, shutting down executor.", sentinels[sentinel].rank
            )
        time.sleep(_DEATH_GRACE_S)
        self._on_failure()

    def execute_model(self, request_ids: list[str]) -> FutureWrapper:
        """Begin a step on all ranks."""
        return self.collective_rpc("execute_model", (request_ids,), output_rank=self.config.output_rank)

    def sample_tokens(self) -> dict[str, str]:
        """The tokens of the step."""
        future = self.collective_rpc("sample_tokens", (None,), output_rank=self.config.output_rank)
        tokens: dict[str, str] = future.result()
        return tokens

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), *, output_rank: int | None = None, timeout: float | None = None
    ) -> FutureWrapper:
        """Call a method on every rank.

        Args:
            method: of the worker.
            args: of the method.
            output_rank: the only rank that answers; None for all.
            timeout: seconds to wait for each answer; vLLM's limit for a step where None.

        Returns:
            A future of the answer of that rank, or of the list of all.
        """
        assert self.rpc_broadcast_mq is not None
        if switches.is_on("lost-wakeup"):
            self.rpc_broadcast_mq.lose_pings()
            switches.entered("lost-wakeup")
        self.rpc_broadcast_mq.enqueue((method, args, {}, output_rank))
        queues = self.response_mqs if output_rank is None else [self.response_mqs[output_rank]]
        patience = envs.EXECUTE_TIMEOUT_S if timeout is None else timeout

        def get_response() -> Any:
            answers = []
            for queue in queues:
                try:
                    ok, answer = queue.dequeue(timeout=patience)
                except TimeoutError as error:
                    raise TimeoutError(f"RPC call to {method} timed out.") from error
                if not ok:
                    raise RuntimeError(f"Worker failed with error {answer!r}")
                answers.append(answer)
            return answers if output_rank is None else answers[0]

        return FutureWrapper(get_response)

    def shutdown(self) -> None:
        """End the workers, then the rings."""
        if self._ending.is_set():
            return
        self._ending.set()
        for worker in self.workers:
            worker.death.close()
        deadline = time.monotonic() + _EXIT_S
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
        for queue in (*self.response_mqs, *([self.rpc_broadcast_mq] if self.rpc_broadcast_mq else [])):
            queue.close()


class WorkerProc:
    """The process of one rank."""

    def __init__(self, config: VllmConfig, rank: int, store: tuple[str, int], input_shm_handle: Any) -> None:
        self.rank, self.config = rank, config
        set_process_title("Worker")
        with _library_lock:
            pass  # the first use of some library
        self.worker = Worker(config, rank, store)
        self.worker.init_device()
        set_process_title("Worker", config.worker_suffix(rank))
        self._init_message_queues(input_shm_handle)
        self.worker.load_model()

    def _init_message_queues(self, handle: Any) -> None:
        """Attach to the broadcast ring, make the response ring; with several nodes the handles go through the group."""
        remote = self.config.nnodes > 1
        slot_bytes, slots = (_REMOTE_SLOT_BYTES, _REMOTE_SLOTS) if remote else (_SLOT_BYTES, _SLOTS)
        here = int(self.config.node_rank == 0)
        self.worker_response_mq = MessageQueue(
            1, here, max_chunk_bytes=slot_bytes, max_chunks=slots, connect_ip=envs.host_ip()
        )
        self.handles = {self.rank: self.worker_response_mq.export_handle()}
        if remote:
            parts = self.worker.parallel.world.all_gather((handle, self.handles))
            handle = parts[0][0]
            self.handles = {rank: made for _, handles in parts for rank, made in handles.items()}
        if switches.is_on("slow-joiner", str(self.rank)):
            switches.sleep_while_on("slow-joiner")
        self.rpc_broadcast_mq = MessageQueue.create_from_handle(handle, self.rank)

    @staticmethod
    def make_worker_process(
        context: Any, config: VllmConfig, rank: int, store: tuple[str, int], handle: Any
    ) -> _WorkerHandle:
        """Start the process of one rank."""
        ready_reader, ready_writer = context.Pipe(duplex=False)
        death_reader, death_writer = context.Pipe(duplex=False)
        process = context.Process(
            target=WorkerProc.worker_main,
            args=(
                config,
                rank,
                store,
                handle,
                ready_writer,
                death_reader,
                death_writer if context.get_start_method() == "fork" else None,
            ),
            name=f"VllmWorker-{rank}",
            daemon=True,
        )
        process.start()
        ready_writer.close()
        death_reader.close()
        return _WorkerHandle(process, ready_reader, death_writer, rank)

    @staticmethod
    def wait_for_ready(workers: list[_WorkerHandle]) -> list[dict[int, Any]]:
        """Wait until every worker has said READY, and take the handles of the response rings from it."""
        pending: dict[Any, _WorkerHandle] = {worker.ready: worker for worker in workers}
        messages = {}
        while pending:
            for pipe in multiprocessing.connection.wait(list(pending)):
                worker = pending.pop(pipe)
                try:
                    messages[worker.rank] = worker.ready.recv()
                except EOFError as error:
                    raise RuntimeError(
                        "WorkerProc initialization failed due to an exception in a background process."
                    ) from error
        return [messages[worker.rank] for worker in workers]

    @staticmethod
    def worker_main(
        config: VllmConfig,
        rank: int,
        store: tuple[str, int],
        handle: Any,
        ready: Connection,
        death: Connection,
        inherited: Connection | None,
    ) -> None:
        """The life of the process."""
        lifeline.hang_on()
        if inherited is not None:
            inherited.close()  # a forked child has its parent's end too, and would never see it closed
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _exit_on_signal)
        proc = WorkerProc(config, rank, store, handle)
        ending = threading.Event()
        threading.Thread(
            target=proc.death_pipe_monitor, args=(death, ending), daemon=True, name="DeathPipeMonitor"
        ).start()
        try:
            ready.send(proc.handles)
            ready.close()
            proc.rpc_broadcast_mq.wait_until_ready()
            proc.worker_response_mq.wait_until_ready()
            proc.worker_busy_loop(ending)
        except Cancelled:
            logger.info("Parent process exited, terminating worker queues")
        finally:
            proc.worker_response_mq.close()
            proc.rpc_broadcast_mq.close()

    def death_pipe_monitor(self, death: Connection, ending: threading.Event) -> None:
        """Wait for the end of the executor, and wake the main thread then."""
        try:
            death.recv()
        except EOFError:
            ending.set()
            self.rpc_broadcast_mq.shutdown()
            self.worker_response_mq.shutdown()

    def worker_busy_loop(self, ending: threading.Event) -> None:
        """Take calls from the ring and execute them, for ever."""
        while not ending.is_set():
            method, args, kwargs, output_rank = self.rpc_broadcast_mq.dequeue(indefinite=True)
            self._execute_worker_rpc(method, args, kwargs, output_rank)
            self._apply_switches()

    def _apply_switches(self) -> None:
        """Faults of the reading end, put in between two calls."""
        me = str(self.rank)
        if switches.is_on("slow-reader", me):
            time.sleep(_SLOW_READER_S)
        if switches.is_on("reader-cut-off", me):
            self.rpc_broadcast_mq.cut_off()
            switches.entered("reader-cut-off")

    def _execute_worker_rpc(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], output_rank: int | None
    ) -> None:
        try:
            answer = (True, getattr(self.worker, method)(*args, **kwargs))
        except Exception as error:  # the engine decides what a failing rank means
            logger.exception("WorkerProc hit an exception.")
            answer = (False, repr(error))
        if output_rank is None or output_rank == self.rank:
            self.handle_output(answer)

    def handle_output(self, answer: tuple[bool, Any]) -> None:
        """Answer through the response ring."""
        if switches.is_on("lost-message", str(self.rank)):
            switches.entered("lost-message")
            return
        self.worker_response_mq.enqueue(answer)


@contextmanager
def _lock_held_elsewhere() -> Iterator[None]:
    """Another thread holds the lock meanwhile."""
    held, over = threading.Event(), threading.Event()

    def use_library() -> None:
        with _library_lock:
            held.set()
            over.wait()

    threading.Thread(target=use_library, daemon=True).start()
    held.wait()
    yield
    over.set()


def _exit_on_signal(*_: object) -> None:
    raise SystemExit


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

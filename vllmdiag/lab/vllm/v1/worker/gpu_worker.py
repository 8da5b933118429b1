"""One rank: it meets the others, loads its model, and computes its part of each step."""

from __future__ import annotations

import time
from typing import Any

from vllmdiag.lab import switches
from vllmdiag.lab.extension import LabExtension
from vllmdiag.lab.vllm import envs
from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.distributed.parallel_state import ParallelState, init_distributed_environment

_LAYERS = 2
_FORWARD_S = 0.003
_LOAD_PIECE_S = 0.05


class Worker(LabExtension):
    """The worker of one rank."""

    def __init__(self, config: VllmConfig, rank: int, store: tuple[str, int]) -> None:
        self.config, self.rank, self._store = config, rank, store
        self.parallel: ParallelState
        self._batch: list[str] = []
        self._step = 0

    def init_device(self) -> None:
        """Meet the other ranks."""
        if switches.is_on("rank-never-comes", str(self.rank)):
            switches.sleep_while_on("rank-never-comes")
        self.parallel = init_distributed_environment(self.config, self.rank, self._store, envs.host_ip())

    def load_model(self) -> None:
        """Take as long as told, and compute meanwhile."""
        end = time.monotonic() + envs.LOAD_S
        while time.monotonic() < end:
            self._load_weights(min(end, time.monotonic() + _LOAD_PIECE_S))

    def _load_weights(self, until: float) -> int:
        """One piece of the model: some work, some waiting for the disk."""
        total = sum(range(20_000))
        time.sleep(max(0.0, (until - time.monotonic()) / 2))
        return total

    def execute_model(self, request_ids: list[str]) -> None:
        """One step: take the result of the stage before, all-reduce in each layer, hand on to the next stage."""
        self._batch = request_ids
        value = len(request_ids)
        if (previous := self.parallel.previous) is not None:
            value = self.parallel.pp.recv_tensor_dict(previous)
        for _ in range(_LAYERS):
            value = self._forward(value)
        if (following := self.parallel.following) is not None:
            self.parallel.pp.send_tensor_dict(value, following)

    def _forward(self, value: int) -> int:
        time.sleep(_FORWARD_S / _LAYERS)
        return self.parallel.tp.all_reduce(value) // len(self.parallel.tp.ranks)

    def sample_tokens(self, _: Any) -> dict[str, str]:
        """The next token of each request."""
        self._step += 1
        return dict.fromkeys(self._batch, f" word{self._step}")

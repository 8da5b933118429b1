"""Collectives on the CPU: each waits for all ranks of its group."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllmdiag.lab.vllm.distributed.mesh import Mesh


class _CPUSHMDistributed:
    """The exchange itself. The n-th call of an operation meets the n-th call of the others."""

    def __init__(self, mesh: Mesh, name: str, ranks: list[int]) -> None:
        self._mesh, self._name, self._ranks = mesh, name, ranks
        self._calls: Counter[str] = Counter()

    def _exchange(self, operation: str, value: Any) -> dict[int, Any]:
        self._calls[operation] += 1
        tag = f"{self._name} {operation} {self._calls[operation]}"
        return self._mesh.exchange(tag, self._ranks, value)

    def all_reduce(self, value: int) -> int:
        return sum(self._exchange("all_reduce", value).values())

    def all_gather(self, value: Any) -> list[Any]:
        parts = self._exchange("all_gather", value)
        return [parts[rank] for rank in self._ranks]


class CpuCommunicator:
    """What a group of ranks calls."""

    def __init__(self, mesh: Mesh, name: str, ranks: list[int]) -> None:
        self.dist_module = _CPUSHMDistributed(mesh, name, ranks)

    def all_reduce(self, value: int) -> int:
        """Sum over the ranks."""
        return self.dist_module.all_reduce(value)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return self.dist_module.all_gather(value)

"""Counters that several API servers keep together, so that /metrics says the same whichever of them answers.

The real one uses the multi-process mode of the Prometheus client for that; here it is an array in shared memory in
which every server has a row of its own.
"""

from __future__ import annotations

from collections.abc import MutableSequence

KINDS = ("running", "generated", "finished")


class Figures:
    """One server's view of them.

    Args:
        values: the array, `size` numbers.
        index: of this server.
        n_servers: API servers.
        n_engines: engines.
    """

    def __init__(self, values: MutableSequence[int], index: int, n_servers: int, n_engines: int) -> None:
        self._values, self._index, self._n_servers, self._n_engines = values, index, n_servers, n_engines

    @staticmethod
    def size(n_servers: int, n_engines: int) -> int:
        """Numbers that the array must have."""
        return n_servers * n_engines * len(KINDS)

    def _place(self, server: int, kind: str, engine: int) -> int:
        return (server * len(KINDS) + KINDS.index(kind)) * self._n_engines + engine

    def add(self, kind: str, engine: int, n: int) -> None:
        """Count."""
        self._values[self._place(self._index, kind, engine)] += n

    def totals(self, kind: str) -> dict[int, int]:
        """Engine -> the sum over all servers."""
        return {
            engine: sum(self._values[self._place(server, kind, engine)] for server in range(self._n_servers))
            for engine in range(self._n_engines)
        }

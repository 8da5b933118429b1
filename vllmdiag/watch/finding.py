"""Which server is watched: the one that was asked for, and after its end the one that takes its place."""

from __future__ import annotations

from vllmdiag.model.errors import TargetError
from vllmdiag.sources import target
from vllmdiag.vllm.instances import Instance


class Wanted:
    """What the command line asks for, and what is known of the server since.

    Args:
        pid: any pid of it, good for the first generation.
        port: its HTTP port.
    """

    def __init__(self, pid: int | None, port: int | None) -> None:
        self._pid, self._port = pid, port

    def find(self) -> Instance | None:
        """The server; None where none is here (yet, or again).

        Raises:
            TargetError: a pid that is none of a server; several servers and none named.
        """
        processes, instances = target.running()
        states = {p.pid: p.state for p in processes}
        alive = tuple(i for i in instances if any(states[pid] not in ("Z", "X") for pid in i.pids))
        if self._pid is not None:
            return target.choose(instances, processes, self._pid, None)
        if self._port is not None:
            mine = [i for i in alive if port_of(i) == self._port]
            if len(mine) == 1 or not alive:
                return mine[0] if mine else None
            return target.choose(alive, processes, None, self._port) if mine else None
        return target.choose(alive, processes, None, None)

    def replaced(self, pids: tuple[int, ...]) -> bool:
        """Whether the server that is wanted is another one than that with these pids."""
        try:
            instance = self.find()
        except TargetError:  # several, and nothing tells which
            return False
        return instance is not None and not set(pids) & set(instance.pids)

    def found(self, instance: Instance) -> None:
        """From now on its successor is wanted: the one that serves the same port, or the only one."""
        self._pid = None
        self._port = port_of(instance)


def port_of(instance: Instance) -> int | None:
    """The HTTP port that a server is to have."""
    return instance.options.port if instance.options is not None and not instance.options.headless else None

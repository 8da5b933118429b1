"""The groups of ranks, and what one rank does in them."""

from __future__ import annotations

from typing import Any

from vllmdiag.lab.vllm.config import VllmConfig
from vllmdiag.lab.vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllmdiag.lab.vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllmdiag.lab.vllm.distributed.mesh import Mesh

_GROUP_SLOT_BYTES, _GROUP_SLOTS = 4 << 20, 6


class GroupCoordinator:
    """A group of ranks of one engine.

    Args:
        mesh: this rank's end of the mesh.
        name: ``world``, ``tp:0`` ...
        ranks: of the group, ascending.
        local_ranks: those of them on this node.
    """

    def __init__(self, mesh: Mesh, name: str, ranks: list[int], local_ranks: list[int]) -> None:
        self.mesh, self.name, self.ranks, self.local_ranks = mesh, name, ranks, local_ranks
        self.device_communicator = CpuCommunicator(mesh, name, ranks)
        self.mq_broadcaster: MessageQueue | None = None

    def all_reduce(self, value: int) -> int:
        """Sum over the ranks; a group of one has nothing to wait for."""
        return self._all_reduce_out_place(value) if len(self.ranks) > 1 else value

    def _all_reduce_out_place(self, value: int) -> int:
        return self.device_communicator.all_reduce(value)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return self.device_communicator.all_gather(value)

    def send_tensor_dict(self, value: Any, to: int) -> None:
        """Hand the result of this stage to a rank of the next one."""
        self.mesh.send(f"{self.name} stage", to, value)

    def recv_tensor_dict(self, sender: int) -> Any:
        """Wait for the result of the stage before."""
        return self.mesh.receive(f"{self.name} stage", sender)

    def create_mq_broadcaster(self, connect_ip: str) -> None:
        """The ring from the first rank of the group to its others; serving hardly uses it."""
        first, others = self.ranks[0], self.ranks[1:]
        if self.mesh.rank == first:
            local = [rank for rank in others if rank in self.local_ranks]
            queue = MessageQueue(
                len(others),
                len(local),
                local_reader_ranks=[others.index(rank) for rank in local],
                max_chunk_bytes=_GROUP_SLOT_BYTES,
                max_chunks=_GROUP_SLOTS,
                connect_ip=connect_ip,
            )
            self.all_gather(queue.export_handle())
        else:
            queue = MessageQueue.create_from_handle(self.all_gather(None)[0], others.index(self.mesh.rank))
        queue.wait_until_ready()
        self.mq_broadcaster = queue


class ParallelState:
    """All groups that one rank is in."""

    def __init__(self, config: VllmConfig, mesh: Mesh, connect_ip: str) -> None:
        tp, rank = config.tensor_parallel_size, mesh.rank
        local = list(config.local_ranks)
        stage = rank // tp
        self.world = GroupCoordinator(mesh, "world", list(range(config.world_size)), local)
        self.tp = GroupCoordinator(mesh, f"tp:{stage}", list(range(stage * tp, (stage + 1) * tp)), local)
        self.pp = GroupCoordinator(mesh, f"pp:{rank % tp}", list(range(rank % tp, config.world_size, tp)), local)
        if tp > 1:
            self.tp.create_mq_broadcaster(connect_ip)

    @property
    def previous(self) -> int | None:
        """The rank of the stage before that hands its result to this one."""
        place = self.pp.ranks.index(self.pp.mesh.rank)
        return self.pp.ranks[place - 1] if place else None

    @property
    def following(self) -> int | None:
        """The rank of the next stage."""
        place = self.pp.ranks.index(self.pp.mesh.rank)
        return self.pp.ranks[place + 1] if place + 1 < len(self.pp.ranks) else None


def init_distributed_environment(
    config: VllmConfig, rank: int, store: tuple[str, int], connect_ip: str
) -> ParallelState:
    """Meet the other ranks of the engine, and form the groups. Returns when all have come."""
    return ParallelState(config, Mesh(rank, config.world_size, store, connect_ip), connect_ip)

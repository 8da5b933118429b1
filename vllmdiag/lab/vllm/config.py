"""What `vllm serve` was told, as far as the miniature knows it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class VllmConfig:
    """The arguments of one `vllm serve`. Ranks are numbered stage by stage: rank = stage * tp + place in the stage."""

    model: str
    port: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    headless: bool

    @property
    def world_size(self) -> int:
        """Workers of one engine, on all nodes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        """Workers of one engine on each node."""
        return self.world_size // self.nnodes

    @property
    def local_ranks(self) -> range:
        """Ranks that run on this node."""
        first = self.node_rank * self.local_world_size
        return range(first, first + self.local_world_size)

    @property
    def output_rank(self) -> int:
        """The rank that answers: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def worker_suffix(self, rank: int) -> str:
        """What the title of a worker ends with: the groups of more than one rank that it is in."""
        stage, place = divmod(rank, self.tensor_parallel_size)
        parts = [f"PP{stage}"] * (self.pipeline_parallel_size > 1) + [f"TP{place}"] * (self.tensor_parallel_size > 1)
        return "_".join(parts)


def parse(arguments: Sequence[str]) -> VllmConfig:
    """Read the arguments behind ``vllm serve``. Exits with 2 on what it does not know, as vLLM does."""
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("model")
    for name, default in (
        ("port", 8000),
        ("tensor-parallel-size", 1),
        ("pipeline-parallel-size", 1),
        ("data-parallel-size", 1),
        ("nnodes", 1),
        ("node-rank", 0),
        ("master-port", 29501),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--headless", action="store_true")
    return VllmConfig(**vars(parser.parse_args(arguments)))

"""The TCP ports that the arguments and the environment of an instance tell it to bind, by purpose."""

from __future__ import annotations

from collections.abc import Mapping

from .serve_options import ServeOptions


def wanted(options: ServeOptions, environ: Mapping[str, str]) -> dict[str, int]:
    """purpose -> port. Only fixed ones: a port that the kernel assigns cannot be taken.

    Args:
        options: the arguments of `vllm serve` of the node.
        environ: what is known of its environment.
    """
    found: dict[str, int] = {}
    if not options.headless and not options.uds:
        found["HTTP"] = options.port
    if options.nnodes > 1 and options.node_rank == 0 and options.master_port:
        found["master"] = options.master_port
    local = options.data_parallel_size_local
    spread = local is not None and local < options.data_parallel_size
    if spread and not options.headless and options.data_parallel_rpc_port:
        found["data-parallel RPC"] = options.data_parallel_rpc_port
    side = environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    if side.isdecimal():
        found["NIXL side channel"] = int(side)
    return found

"""The options of a `vllm serve` command line that decide what its process tree looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from vllmdiag.model.base import Fact


class ServeOptions(Fact, frozen=True, kw_only=True):
    """What the command line says; None where it says nothing and vLLM decides."""

    model: str | None = None
    config: str | None = None
    """A YAML file with more options: what is absent here may stand there."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    """Ranks of it are a part of the tensor-parallel ranks: it adds no process."""
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_address: str | None = None
    data_parallel_rpc_port: int | None = None
    data_parallel_backend: str | None = None
    data_parallel_hybrid_lb: bool = False
    data_parallel_external_lb: bool = False
    data_parallel_multi_port_external_lb: bool = False
    api_server_count: int | None = None
    """None: not given, and vLLM starts one for each data-parallel rank."""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    headless: bool = False
    enable_expert_parallel: bool = False
    executor_backend: str | None = None
    host: str | None = None
    port: int = 8000
    uds: str | None = None
    root_path: str | None = None

    @property
    def world_size(self) -> int:
        """Workers of one engine, on all its nodes together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def several_servers(self) -> bool:
        """Each data-parallel rank (or node) has an API server of its own, all of them parts of one job."""
        return self.data_parallel_rank is not None or (
            self.data_parallel_hybrid_lb or self.data_parallel_external_lb or self.data_parallel_multi_port_external_lb
        )


@cache
def _types() -> Mapping[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(ServeOptions)}


def parse_options(arguments: Sequence[str], names: Mapping[str, str]) -> ServeOptions:
    """Read the arguments after the verb, the way argparse would, but never failing.

    Accepts ``--x=y``, ``--x y``, dashes or underscores, short forms such as ``-tp 2`` and ``-tp=2``. An option this
    table does not know, or a value that is not of the right type, is passed over. The last of several wins.

    Args:
        arguments: argv after ``serve`` (or after ``-m module``).
        names: option name with dashes, without the leading ones, to the field of `ServeOptions`.
    """
    values: dict[str, Any] = {}
    positional = None
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        if not argument.startswith("-"):
            # The model is the only positional one and comes first; a later bare word is the value of an unknown option.
            if at == 1:
                positional = argument
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        field = names.get(name.replace("_", "-"))
        if field is None:
            continue
        if _types()[field] is bool:
            values[field] = value.lower() not in ("false", "0") if equals else True
            continue
        if not equals:
            if at == len(arguments):
                break
            value = arguments[at]
            at += 1
        try:
            values[field] = msgspec.convert(value, _types()[field], strict=False)
        except msgspec.ValidationError:
            continue
    values.setdefault("model", positional)
    return ServeOptions(**values)


def job_of(options: ServeOptions | None) -> tuple[str, str | None, int | None] | None:
    """What the commands of one job over several nodes have in common: (kind, address, port); None for a job of one."""
    if options is not None and options.nnodes > 1:
        return "nodes", options.master_addr, options.master_port
    if options is not None and options.data_parallel_size > 1 and _one_of_several(options):
        return "dp", options.data_parallel_address, options.data_parallel_rpc_port
    return None


def _one_of_several(options: ServeOptions) -> bool:
    """This command starts a part of the engines only: a headless node, or one rank behind an external balancer."""
    return (
        options.headless
        or options.data_parallel_rank is not None
        or options.data_parallel_external_lb
        or options.data_parallel_hybrid_lb
        or (options.data_parallel_size_local or options.data_parallel_size) < options.data_parallel_size
    )

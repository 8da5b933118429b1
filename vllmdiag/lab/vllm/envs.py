"""Settings from the environment, under vLLM's own names, and the few that only the lab has."""

from __future__ import annotations

import os
import tempfile
import uuid

from vllmdiag.vllm.versions import in_range
from vllmdiag.vllm.wakeup import recheck_s

VERSION = os.environ.get("VLLMDIAG_LAB_VERSION", "0.32.0")
"""The version that it plays: what /version says, and the habits that differ between versions."""

HWM = int(os.environ.get("VLLMDIAG_LAB_HWM", "0"))
"""High-water mark of the sockets between server and engine; vLLM sets none (0)."""

LOAD_S = float(os.environ.get("VLLMDIAG_LAB_LOAD_S", "0.1"))
"""Seconds that a worker takes to load its model."""

EXECUTE_TIMEOUT_S = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300"))


def host_ip() -> str:
    """The address of this node."""
    return os.environ.get("VLLM_HOST_IP", "127.0.0.1")


def ipc_path() -> str:
    """A new path for an ipc endpoint: no role in its name, as in vLLM."""
    return f"ipc://{os.environ.get('VLLM_RPC_BASE_PATH', tempfile.gettempdir())}/{uuid.uuid4()}"


def reader_recheck_s() -> float | None:
    """After how long a sleeping reader looks at its flag without a ping; None where that version never does."""
    return recheck_s(VERSION)


def has_ready_response() -> bool:
    """Whether an engine reports ready on each input socket and the front end waits for it there."""
    return in_range(VERSION, "0.9", None)

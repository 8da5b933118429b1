"""The title of a process, as setproctitle sets it: the words that the kernel keeps of its command line, overwritten."""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46
"""Fields 48 and 49 of /proc/PID/stat, counted from the one behind the name."""


def set_process_title(name: str, suffix: str = "") -> None:
    """Title this process ``VLLM::name_suffix``; its comm becomes the first 15 characters of that."""
    title = f"VLLM::{name}{f'_{suffix}' if suffix else ''}".encode()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, min(len(title), end - start - 1))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(title), 0, 0, 0)

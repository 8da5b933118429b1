"""vLLM's version in words: `pip list`, `vllm --version`, collect_env, or a person's own line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllmdiag.bundle.draft import Draft

from .format import Context, block

_VERSION = re.compile(
    r"^\W{0,8}(?:pip3?\W{1,4})?(?:[\w ]{0,20}\bversion of )?vllm(?:[ \-_]+(?:api server )?version)?\W{0,6}\s*"
    r"[=:]{0,2}\s*v?"
    r"(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|post|dev|a|b)\d+)*(?:\+[\w.]+)?)\b",
    re.IGNORECASE,
)


def _fits(line: str, _context: Context) -> bool:
    return len(line) < 200 and "vllm" in line.lower() and _VERSION.match(line) is not None


def _read(lines: Sequence[str], _context: Context, draft: Draft) -> None:
    found = _VERSION.match(lines[0])
    if found is not None and not draft.version:
        draft.version = found["version"]


FORMATS = (block("version of vLLM", _fits, lambda _line, _context: False, _read),)

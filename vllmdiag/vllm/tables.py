"""Reads the JSON tables of vllmdiag/vllm/data once each, checked against their structs."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import TypeVar

import msgspec

T = TypeVar("T")


def load(name: str, kind: type[T]) -> T:
    """Decode ``vllmdiag/vllm/data/<name>.json``.

    Raises:
        msgspec.ValidationError: the table does not have the shape of `kind` (a bug of vllmdiag).
    """
    text = (resources.files("vllmdiag.vllm") / "data" / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=kind)


@cache
def vocabulary() -> frozenset[str]:
    """Every word of every table, in lower case: what vLLM itself says, which names nobody."""
    files = (file for file in (resources.files("vllmdiag.vllm") / "data").iterdir() if file.name.endswith(".json"))
    return frozenset(word.lower() for file in files for word in re.findall(r"[A-Za-z0-9]{2,}", file.read_text("utf-8")))

"""Reads the JSON tables of vllmdiag/vllm/data once each, checked against their structs."""

from __future__ import annotations

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

"""Paths below homes: without who lives there and what files are called, with what rules and readers know them by.

Kept are the shape of the path, names that caches, virtual environments and installed packages always have, extensions
and the numbers of weight files. Everything else below a home becomes a token.
"""

from __future__ import annotations

import re

from vllmdiag.vllm.footprint import is_library
from vllmdiag.vllm.stages import cache_mark, shard_of, shim_in

from .redact_tokens import Tokens, is_token

_HOME = (
    r"(?P<home>(?<![\w~.-])(?:/[^/\s:;,'\"<>()\[\]{}|&]+)*?/(?:home\d*|homes|Users)/)(?P<user>[^/\s:;,'\"<>()\[\]{}|&]+)"
    r"|(?P<root>(?<![\w~.-])/root(?=/|$|[^\w.-]))"
    r"|(?P<tilde>(?<![\w/~.-])~(?P<tilde_user>[\w.-]+)(?=/))"
)
_REST = r"(?P<rest>(?:/[^/\s:;,'\"<>()\[\]{}|&]*)*)"
_IN_TEXT = re.compile(f"(?:{_HOME}){_REST}")
_ALONE = re.compile(f"(?:{_HOME})(?P<rest>/.*)?", re.DOTALL)
_CACHE_OF_USER = re.compile(r"(?P<mark>(?<=/)torchinductor_)(?P<user>[A-Za-z][\w.-]*)(?=/|$)")
"""The directory of temporary files that has the user in its name."""

_PACKAGES = ("site-packages", "dist-packages")
_USUAL = re.compile(
    r"python\d*(?:\.\d+)*|lib\d*|bin|share|src|envs?|\.?venv\w?|(?:mini|ana|micro)?(?:conda|mamba|forge)\d?|\.?cache|"
    r"\.?config|\.?local|state|tmp|logs?|hub|models|datasets|blobs|snapshots|refs|locks?|\.locks|\.\w{1,3}|"
    r"(?:site|dist)-packages|(?:pytorch_|adapter_)?model|consolidated|(?:generation_)?config|tokenizer|main|server|"
    r"vllm|torch|torch_compile_cache|torch_extensions|torchinductor|inductor_cache|precompiled_headers|huggingface|"
    r"\.?triton|flashinfer|\.?keras|modelinfos|rank_\d+_\d+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|backbone|\.nv|ComputeCache|(?:vllm_)?cache",
    re.IGNORECASE,
)
"""Names that are the same at every home."""
_HUB = re.compile(r"(?:models|datasets)--[\w.-]+--[\w.-]+")
"""A directory of the hub: the public name of a model."""
_EXTENSION = re.compile(
    r"\.(?:safetensors|gguf|bin|pth?|json|jsonl|ya?ml|toml|py|sh|so|lock|log|txt|out|err|sock|pid|conf|index\.json)$"
)


class Homes:
    """Writes paths anew under one set of tokens."""

    def __init__(self, tokens: Tokens, homes: frozenset[str] = frozenset()) -> None:
        self._tokens = tokens
        # The longest first: a home may lie below another one.
        more = sorted((re.escape(home) for home in homes), key=len, reverse=True)
        self._more = re.compile(f"(?P<place>(?:{'|'.join(more)})){_REST}") if more else None

    def path(self, path: str) -> str:
        """A path that stands alone: it may hold blanks."""
        found = _ALONE.fullmatch(path)
        return self.text(path) if found is None else self._new(found)

    def text(self, text: str) -> str:
        """All paths below homes in a text."""
        if "/" not in text:
            return text
        text = _IN_TEXT.sub(self._new, text)
        if self._more is not None:
            text = self._more.sub(lambda m: m["place"] + self._rest(m["rest"]), text)
        return _CACHE_OF_USER.sub(lambda m: m["mark"] + self._tokens.user(m["user"]), text)

    def _new(self, found: re.Match[str]) -> str:
        rest = self._rest(found["rest"] or "")
        if found["root"]:
            return found["root"] + rest
        if found["tilde"]:
            return "~" + self._tokens.user(found["tilde_user"]) + rest
        return found["home"] + self._tokens.user(found["user"]) + rest

    def _rest(self, rest: str) -> str:
        """What follows the home; names of installed packages stay."""
        parts: list[str] = []
        for part in rest.split("/"):
            packaged = any(package in parts for package in _PACKAGES)
            parts.append(part if packaged else self._part(part))
        return "/".join(parts)

    def _part(self, part: str) -> str:
        if not part or part in {".", ".."} or is_token(part) or _USUAL.fullmatch(part) or _HUB.fullmatch(part):
            return part
        if is_library(f"/{part}") or shim_in([f"/{part}"]):
            return part
        extension = found[0] if (found := _EXTENSION.search(part)) else ""
        stem = part.removesuffix(extension)
        number = re.search(r"-\d+-of-\d+$", stem) if shard_of(part) else None
        stem = stem[: number.start()] if number else stem
        mark = cache_mark(f"/{part}/").strip("/")
        known = self._tokens.name(stem) if not _USUAL.fullmatch(stem) else stem
        return (f"{mark}-" if mark else "") + known + (number[0] if number else "") + extension


def users_in(text: str) -> set[str]:
    """Who lives at the homes that a text names."""
    if "/" not in text:
        return set()
    found = {m["user"] or m["tilde_user"] for m in _IN_TEXT.finditer(text)}
    found |= {m["user"] for m in _CACHE_OF_USER.finditer(text)}
    return {user for user in found if user}

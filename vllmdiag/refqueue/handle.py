"""What the writer tells its readers, so that they find the ring and the sockets."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from vllmdiag.model.base import Fact

from .errors import QueueArgumentError
from .ring import BufferHandle

T = TypeVar("T")


class Handle(Fact, frozen=True, kw_only=True):
    """The fields of vLLM's ``shm_broadcast.Handle``, by the same names. Can be pickled and sent as JSON or msgpack."""

    local_reader_ranks: tuple[int, ...] = ()
    """Rank of each reader of the ring, in the order of their flags. All other ranks read from the remote address."""
    buffer_handle: BufferHandle | None = None
    local_subscribe_addr: str | None = None
    """Where messages too long for a slot come from."""
    local_notify_addr: str | None = None
    """Where pings come from; None before vLLM 0.18."""
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False

    @classmethod
    def from_vllm(cls, handle: Any) -> Handle:
        """Ours, from vLLM's of any version.

        Raises:
            QueueArgumentError: its writer puts tensors into an arena (``--enable-shm-tensor-arena``), where only torch
                can read them.
        """
        if getattr(handle, "tensor_arena_handle", None) is not None:
            raise QueueArgumentError("the writer sends its tensors through an arena of torch")
        known = {name: getattr(handle, name) for name in cls.__struct_fields__ if hasattr(handle, name)}
        return cls(**{**known, "local_reader_ranks": tuple(handle.local_reader_ranks)})

    def to_vllm(self, kind: type[T]) -> T:
        """vLLM's, from ours.

        Args:
            kind: ``Handle`` of the vLLM there is; fields that this version has not are left out.
        """
        has = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        known = {name: getattr(self, name) for name in self.__struct_fields__ if name in has}
        return kind(**{**known, "local_reader_ranks": list(self.local_reader_ranks)})

"""Numbers of the GPU stack in words: NVML errors, throttle bits, Xids, NCCL results; and where it leaves files."""

from __future__ import annotations

from functools import cache

import msgspec

from .tables import load


class Spin(msgspec.Struct, frozen=True):
    """When a GPU is taken to run a kernel that only waits."""

    busy_pct: int
    """At least."""
    memory_busy_pct: int
    """At most."""
    power_share: float
    """At most, of the limit."""
    source: str


class Throttle(msgspec.Struct, frozen=True):
    """One reason for which a GPU runs slower than it could."""

    bit: int
    text: str
    usual: bool = False
    """It happens to every GPU at work, and is no trouble."""


class NvmlError(msgspec.Struct, frozen=True):
    """One return code of NVML."""

    code: str
    """Empty: the GPU or the driver merely does not offer the value."""
    text: str
    next: str
    critical: bool = False


class Ras(msgspec.Struct, frozen=True):
    """NCCL RAS."""

    host: str
    port: int
    first_version: str
    results: dict[int, str]
    """ncclResult_t in words."""
    in_progress: int
    """The result that is no error: the initialisation goes on."""
    limits: tuple[str, ...]
    """What its counts do not show; to be said whenever they are shown."""


class FlightRecorder(msgspec.Struct, frozen=True):
    """Where torch leaves its dumps, and listens for the wish to have one."""

    stem_variables: tuple[str, ...]
    stems: tuple[str, ...]
    """Used where no variable is set: path without the rank."""
    pipe_variables: tuple[str, ...]
    pipe_suffix: str


class Gpu(msgspec.Struct, frozen=True):
    """The table."""

    spin: Spin
    throttle: tuple[Throttle, ...]
    recovery: dict[int, str]
    fabric: dict[int, str]
    xids: dict[int, str]
    harmless_xids: tuple[int, ...]
    nvml_errors: dict[int, NvmlError]
    ras: Ras
    flight_recorder: FlightRecorder


@cache
def gpu() -> Gpu:
    """The table, read once."""
    return load("gpu", Gpu)


def speaks_ras(library: str) -> bool:
    """Whether a mapped file is a library that may have a RAS thread: NCCL, or AMD's RCCL."""
    return library.rpartition("/")[2].startswith(("libnccl", "librccl"))


def nvml_error(number: int, said: str) -> NvmlError:
    """A return code in words; one that is not known is given with what the library says of it."""
    return gpu().nvml_errors.get(number) or NvmlError(
        code=f"nvml-{number}", text=f"NVML error {number}: {said}", next="nvidia-smi -q"
    )

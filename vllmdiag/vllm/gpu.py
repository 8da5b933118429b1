"""Numbers of the GPU stack in words: NVML errors, throttle bits, Xids, NCCL results; and where it leaves files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from .tables import load
from .versions import in_range, parse


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


class KnownHang(msgspec.Struct, frozen=True):
    """A release of a kernel library that is known to hang a GPU."""

    package: str
    library: str
    """Pattern of the mapped file, or of the frame, that shows these kernels in use."""
    text: str
    next: str
    source: str
    since: str | None = None
    until: str | None = None


class Gpu(msgspec.Struct, frozen=True):
    """The table."""

    spin: Spin
    throttle: tuple[Throttle, ...]
    recovery: dict[int, str]
    fabric: dict[int, str]
    levels: dict[int, str]
    """nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo`."""
    p2p: dict[int, str]
    """nvmlGpuP2PStatus_t in words."""
    xids: dict[int, str]
    harmless_xids: tuple[int, ...]
    program_xids: tuple[int, ...]
    """Those that a program brings on itself; the others speak of the hardware or its firmware."""
    hard_troubles: tuple[str, ...]
    """Codes of `Trouble` that stay until somebody resets or replaces the device."""
    known_hangs: tuple[KnownHang, ...]
    packages: dict[str, tuple[str, ...]]
    """Package -> names of its distributions, as they stand in their dist-info."""
    library_version: dict[str, str]
    """Package -> pattern that finds its version in the path of a mapped library."""
    kernel_libraries: str
    """Pattern of the paths of vLLM's own kernels."""
    rdma_memlock_bytes: int
    """RDMA with less than this cannot register the buffers of a few communicators."""
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


def version_in_path(package: str, path: str) -> str:
    """The version of a package that the path of one of its libraries tells; empty where it tells none."""
    pattern = gpu().library_version.get(package)
    found = re.search(pattern, path) if pattern is not None else None
    return found["version"] if found is not None else ""


def known_hang(package: str, version: str, traces: Iterable[str]) -> KnownHang | None:
    """The known hang of a release of which a mapped library or a frame shows the kernels in use."""
    seen = tuple(traces)
    for one in gpu().known_hangs:
        known = one.package == package and parse(version) is not None and in_range(version, one.since, one.until)
        if known and any(re.search(one.library, text) for text in seen):
            return one
    return None


def runs_on(archs: Iterable[str], capability: str) -> bool | None:
    """Whether kernels for these architectures run on a GPU: built for it, for an older one of its family, or as PTX.

    Args:
        archs: ``sm_90``, ``sm_100a``, ``compute_90``; a suffix ``a`` ties kernels to that one architecture, ``f`` to
            its family.
        capability: ``9.0``.

    Returns:
        None where one of the two is not known.
    """
    major, dot, minor = capability.partition(".")
    names = [found for arch in archs if (found := _ARCH.fullmatch(arch))]
    if not names or not dot:
        return None
    wanted = int(major), int(minor)
    for found in names:
        have = int(found["number"][:-1]), int(found["number"][-1])
        if found["suffix"] == "a":
            fits = have == wanted
        elif found["kind"] == "compute":
            fits = have <= wanted
        else:
            fits = have[0] == wanted[0] and have[1] <= wanted[1]
        if fits:
            return True
    return False


_ARCH = re.compile(r"(?P<kind>sm|compute)_(?P<number>\d{2,3})(?P<suffix>[af]?)")

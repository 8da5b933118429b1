"""What the tests of the GPU layer share: the stub driver, compiled once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllmdiag.model.gpu import Accelerator, Driver
from vllmdiag.sources.nvml import Nvml

HERE = Path(__file__).parent
Look = Callable[..., tuple[Driver, tuple[Accelerator, ...]]]


@pytest.fixture(scope="session")
def stub_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libnvidia-ml.so.1 of our own."""
    directory = tmp_path_factory.mktemp("nvml")
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HERE / "nvml_stub.c"], check=True)
    return directory


@pytest.fixture
def look(stub_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """Read the stub twice with what ails it, as the window does."""
    opened: list[Nvml] = []

    def read(ails: str, *, rounds: int = 2, patience_s: float = 60.0, root: Path = Path("/")) -> object:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory))
        monkeypatch.setenv("NVMLSTUB", ails)
        begin = time.monotonic()
        probe = Nvml(lambda: time.monotonic() - begin, str(root))
        opened.append(probe)
        for _ in range(rounds):
            probe.read(time.monotonic() + patience_s)
        return probe.result()

    yield read  # type: ignore[misc]
    for probe in opened:
        probe.close()

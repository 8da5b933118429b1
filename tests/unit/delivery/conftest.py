"""What is built once for the tests of this room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import zipapp

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "{}.{}".format(*sys.version_info)


class Built(NamedTuple):
    """The two distributions."""

    wheel: Path
    sdist: Path


def build(source: Path, out: Path, **env: str) -> Built:
    """Both distributions from a tree, by the build backend as pip calls it."""
    code = (
        "import sys; from hatchling import build;"
        "print(build.build_wheel(sys.argv[1])); print(build.build_sdist(sys.argv[1]))"
    )
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    wheel, sdist = done.stdout.split()
    return Built(out / wheel, out / sdist)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheels(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """What the archive is made of, for the Python that runs the tests."""
    return {PYTHON: zipapp.wheels(built.wheel, PYTHON, tmp_path_factory.mktemp("wheels"))}


@pytest.fixture(scope="session")
def pyz(wheels: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive."""
    out = tmp_path_factory.mktemp("pyz") / "vllmdiag.pyz"
    zipapp.assemble(out, wheels)
    return out

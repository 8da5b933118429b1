"""The wheel and the source archive: what is in them, that they can be installed, that they can be made again."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.delivery.conftest import ROOT, Built, build
from vllmdiag import version_text
from vllmdiag.catalogue.entries import catalogue

PLAYBOOKS = {path.name for path in (ROOT / "playbooks").glob("*.md")}


def _tracked() -> list[str]:
    """Files of the project: those that git knows or would take, or, in an unpacked source archive, all."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    skip = {".venv", "__pycache__", "dist"}
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.parts)]


def test_the_wheel_holds_the_program_its_data_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    inside = {name.removeprefix("vllmdiag/") for name in names if name.startswith("vllmdiag/")}
    package = {name.removeprefix("vllmdiag/") for name in _tracked() if name.startswith("vllmdiag/")}
    assert inside == package | {f"playbooks/{name}" for name in PLAYBOOKS}
    shared = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    assert shared == {
        "share/man/man1/vllmdiag.1",
        "share/bash-completion/completions/vllmdiag",
        "share/fish/vendor_completions.d/vllmdiag.fish",
        "share/zsh/site-functions/_vllmdiag",
    }
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vllmdiag"}


def test_the_source_archive_holds_what_is_needed_to_work_on_it(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {name for name in _tracked() if not name.startswith(".")}
    assert names >= {"Makefile", "playbooks/idle.md", "docs/man/vllmdiag.1", "tests/conftest.py", "tools/zipapp.py"}
    assert not [name for name in names if ".venv" in name or "__pycache__" in name or name.startswith(".hypothesis")]


def test_the_wheel_of_the_source_archive_is_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    again = build(unpacked, tmp_path / "dist")
    assert _hash(again.wheel) == _hash(built.wheel)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_elsewhere_at_another_time_gives_the_same_bytes(tmp_path: Path) -> None:
    builds = []
    for number, umask in enumerate((0o022, 0o077)):
        source = tmp_path / f"tree{number}"
        for name in _tracked():
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            copy.chmod((ROOT / name).stat().st_mode & 0o777 & ~umask)
            os.utime(copy, (1_700_000_000 + number * 86_400,) * 2)
        builds.append(build(source, tmp_path / f"dist{number}", SOURCE_DATE_EPOCH="1700000000"))
    first, second = builds
    assert first.wheel.name == second.wheel.name
    assert _hash(first.wheel) == _hash(second.wheel)
    assert _hash(first.sdist) == _hash(second.sdist)


@pytest.mark.timeout(300)
def test_the_wheel_is_installed_into_a_fresh_environment_and_runs_there(built: Built, tmp_path: Path) -> None:
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    subprocess.run([env / "bin/python", "-m", "pip", "install", "-qq", str(built.wheel)], check=True)

    def run(*args: str) -> str:
        clean = {"PATH": os.defpath, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [env / "bin/vllmdiag", *args], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert run("--version") == version_text() + "\n"
    assert all(f"  {cause} " in run("playbook", "list") for cause in list(catalogue())[:1])
    assert "_vllmdiag" in run("completion", "bash")
    assert "slow joiner" in run("explain")
    assert (env / "share/man/man1/vllmdiag.1").read_text() == (ROOT / "docs/man/vllmdiag.1").read_text()

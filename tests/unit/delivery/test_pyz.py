"""vllmdiag.pyz: one file, a Python without anything installed, a live server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tools import zipapp
from vllmdiag import version_text
from vllmdiag.lab.faults import named
from vllmdiag.lab.inject import inject
from vllmdiag.lab.server import Lab, Shape

BARE = getattr(sys, "_base_executable", sys.executable)


def _run(pyz: Path, home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The archive under a Python that imports nothing that is installed."""
    clean = {"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8", **env}
    return subprocess.run(
        [BARE, "-S", str(pyz), *args], cwd=home, env=clean, capture_output=True, text=True, check=False
    )


def _unpacked(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "vllmdiag").iterdir())


def test_it_unpacks_once_into_a_private_directory(pyz: Path, tmp_path: Path) -> None:
    first = _run(pyz, tmp_path, "--version")
    assert (first.returncode, first.stdout, first.stderr) == (0, version_text() + "\n", "")
    (directory,) = _unpacked(tmp_path)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not [path for path in directory.rglob("*") if path.stat().st_mode & 0o077 and path.suffix == ".so"]
    before = directory.stat().st_ino
    assert _run(pyz, tmp_path, "playbook", "list").returncode == 0
    (directory,) = _unpacked(tmp_path)
    assert directory.stat().st_ino == before


@pytest.mark.parametrize("victim", ["bin/py-spy", "site/vllmdiag/cli/main.py"])
def test_what_was_changed_after_unpacking_is_never_run(victim: str, pyz: Path, tmp_path: Path) -> None:
    _run(pyz, tmp_path, "--version")
    (directory,) = _unpacked(tmp_path)
    good = (directory / victim).read_bytes()
    (directory / victim).write_bytes(b"#" * len(good) if victim.startswith("bin/") else b"raise SystemExit('evil')")
    assert _run(pyz, tmp_path, "--version").stdout == version_text() + "\n"
    (directory,) = _unpacked(tmp_path)
    assert (directory / victim).read_bytes() == good


def test_a_cache_that_others_can_write_to_is_not_used_and_nothing_is_left(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    cache = tmp_path / ".cache" / "vllmdiag"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    done = _run(pyz, tmp_path, "--version", TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (0, version_text() + "\n")
    assert list(cache.iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_damaged_archive_is_refused_and_says_what_to_do(pyz: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pyz"
    with zipfile.ZipFile(pyz) as good, zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            data = good.read(name)
            archive.writestr(name, data[::-1] if name.startswith("blobs/") and data[:4] == b"\x7fELF" else data)
    done = _run(bad, tmp_path, "--version")
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("error: the archive is damaged\n  why:  ")
    assert _unpacked(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "why"), [({"pythons": {"3.99": {}}}, "it is for 3.99"), ({"machine": "pdp11"}, "it is for Linux pdp11")]
)
def test_what_is_not_in_it_is_said(change: dict[str, object], why: str, pyz: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pyz"
    with zipfile.ZipFile(pyz) as good, zipfile.ZipFile(other, "w") as archive:
        archive.writestr("__main__.py", good.read("__main__.py"))
        archive.writestr("manifest.json", json.dumps({**json.loads(good.read("manifest.json")), **change}))
    done = _run(other, tmp_path, "--version")
    assert done.returncode == 69
    assert f"  why:  {why}" in done.stderr
    assert "  next: " in done.stderr


def test_the_same_wheels_give_the_same_bytes(pyz: Path, wheels: dict[str, list[Path]], tmp_path: Path) -> None:
    again = tmp_path / "again.pyz"
    zipapp.assemble(again, wheels)
    assert again.read_bytes() == pyz.read_bytes()


@pytest.mark.needs("root", "unshare", "mount")
def test_in_a_mount_namespace_with_a_bare_python_it_names_the_fault_of_a_live_server(pyz: Path, tmp_path: Path) -> None:
    site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    home = tmp_path / "home"
    home.mkdir()
    fault = named("worker-stopped")
    with Lab(Shape()) as lab:
        lab.wait_ready()
        inject(lab, fault)
        script = (
            'mount -t tmpfs none "$1" && mount -t tmpfs none "$HOME" && cd "$HOME" || exit 99; '
            '"$2" -c "import typer" 2>/dev/null && exit 98; '
            'exec "$2" "$3" diagnose "$4" --format json'
        )
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", site, BARE, str(pyz), str(lab.root)],
            env={"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["cause"], verdict["subject"]["label"]) == ("process-stopped", "Worker_TP1")
    assert any("all_reduce" in line for line in verdict["evidence"]), "the stacks of py-spy are missing"
    assert list(home.iterdir()) == []

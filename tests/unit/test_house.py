"""The house itself: tests that are left out are named, and the version stands in one place."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllmdiag

ROOT = Path(__file__).resolve().parents[2]

_TWO_TESTS = """
import pytest

@pytest.mark.needs("a-program-that-nobody-has")
def test_with_helper():
    raise AssertionError

def test_without():
    pass
"""


@pytest.mark.parametrize(("everything", "code"), [("0", 0), ("1", 1)])
def test_a_test_without_its_helper_is_left_out_by_name_or_fails_when_all_must_run(
    everything: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_two.py").write_text(_TWO_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "VLLMDIAG_TEST_ALL": everything, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    left_out = "left out: 1 (needs a-program-that-nobody-has, which is not installed)" in done.stdout
    assert left_out == (everything == "0")
    assert "test_with_helper" in done.stdout


def test_the_version_that_is_installed_is_the_version_that_is_printed() -> None:
    assert importlib.metadata.version("vllmdiag") == vllmdiag.__version__


def test_the_makefile_and_ci_name_every_tier() -> None:
    makefile = (ROOT / "Makefile").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f"\n{target}:" in makefile for target in ("test", "test-vllm", "lint", "bench"))
    assert all(f"\nmake {target}\n" in ci + "\n" for target in ("lint", "test", "test-vllm"))

"""The arrows between the rooms, and what no file of the project may hold. DESIGN.md says the same in words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllmdiag"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "vllm": {"model"},
    "catalogue": {"model", "vllm"},
    "sources": {"model", "vllm", "catalogue"},
    "diagnosis": {"model", "vllm", "catalogue"},
    "acts": {"model", "vllm", "sources"},
    "bundle": {"model", "vllm", "catalogue", "sources", "diagnosis", "render"},
    "render": {"model", "vllm", "catalogue"},
    "watch": {"model", "vllm", "catalogue", "sources", "diagnosis", "bundle", "render"},
    "fleet": {"model", "vllm", "catalogue", "sources", "diagnosis", "bundle", "render"},
    "plan": {"model", "vllm", "catalogue", "sources"},
    "refqueue": {"model", "vllm"},
    "lab": {"model", "vllm", "catalogue", "sources", "diagnosis", "bundle", "render", "refqueue"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT) - {"refqueue"}
"""Room -> the other rooms it may import. A new room must be entered here, and in DESIGN.md."""

PURE = {"model", "vllm", "catalogue", "diagnosis", "render"}
IMPURE_MODULES = {
    "ctypes",
    "multiprocessing",
    "os",
    "psutil",
    "random",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
}
"""What reads a clock or touches the machine. (`vllm` and `catalogue` read their own packaged data, nothing else.)"""

TOUCHES_THE_MACHINE = {"ctypes", "psutil", "pynvml", "socket", "subprocess", "zmq"}
MAY_TOUCH_THE_MACHINE = {"sources", "acts", "watch", "fleet", "refqueue", "lab"}

LONGEST_FILE = 400


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _room(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere in it, relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(part for part in (base, node.module) if part)
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def _rooms_imported(path: Path) -> set[str]:
    dotted = (name.split(".") for name in _imports(path))
    return {parts[1] for parts in dotted if parts[0] == "vllmdiag" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir()}


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_run_one_way(path: Path) -> None:
    room = _room(path)
    if room is None:
        assert path.name in {"__init__.py", "__main__.py"}
        assert _rooms_imported(path) <= {"cli"}
        return
    assert room in MAY_IMPORT, f"the room {room} is not entered in the rules"
    assert _rooms_imported(path) - {room} <= MAY_IMPORT[room]


def test_the_rules_have_no_cycle_and_keep_sources_and_diagnosis_apart() -> None:
    done: set[str] = set()
    while left := set(MAY_IMPORT) - done:
        ready = {room for room in left if MAY_IMPORT[room] <= done}
        assert ready, f"a cycle among {sorted(left)}"
        done |= ready
    assert "sources" not in MAY_IMPORT["diagnosis"]
    assert "diagnosis" not in MAY_IMPORT["sources"]
    assert [room for room, others in MAY_IMPORT.items() if "refqueue" in others] == ["lab"]
    assert not any("cli" in others for others in MAY_IMPORT.values())


@pytest.mark.parametrize("path", [path for path in MODULES if _room(path) in PURE], ids=_name)
def test_pure_rooms_read_no_clock_and_touch_no_machine(path: Path) -> None:
    assert {name.split(".")[0] for name in _imports(path)} & IMPURE_MODULES == set()


@pytest.mark.parametrize("path", [path for path in MODULES if _room(path) not in MAY_TOUCH_THE_MACHINE], ids=_name)
def test_only_sources_and_their_like_touch_the_machine(path: Path) -> None:
    assert {name.split(".")[0] for name in _imports(path)} & TOUCHES_THE_MACHINE == set()


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_file_is_one_small_room_that_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(_tree(path)), "no module docstring"
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_FILE


def _tracked() -> list[Path]:
    """Files of the repository; in an unpacked source archive, which has no git, all files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not {".venv", "__pycache__"} & set(path.parts)]


# A path at a home or workplace. Behind a word, a brace or a star it is the tail of a longer one (/proc/PID/root/dev).
_HOMES = "home|root|Users|work"
_HOME_PATH = re.compile(rf"(?<![\w.}}\])>*$-])/(?:{_HOMES})/(?!dev\b|proc\b|sys\b|tmp\b|run\b|etc\b|usr\b|var\b)[\w.]")
_INDEX_HOST = re.compile("|".join((r"pypi\." + "org", r"python" + r"hosted\.org", r"test\.pypi")))


@pytest.mark.parametrize("pattern", [_HOME_PATH, _INDEX_HOST], ids=["a path at a home", "the host of a package index"])
def test_no_tracked_file_names(pattern: re.Pattern[str]) -> None:
    found = []
    for path in _tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{_name(path)}: {match[0]!r}" for match in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize("home", ["home", "root", "Users", "work"])
def test_a_path_at_a_home_would_be_found_and_one_through_proc_is_none(home: str) -> None:
    assert _HOME_PATH.search(f'log = "/{home}/somebody/vllm.log"')
    assert not _HOME_PATH.search(f"/proc/123/{home}/dev/shm")


def test_asking_for_the_version_imports_nothing_big() -> None:
    code = "import sys; from vllmdiag.cli.main import main; main(['--version']); print(*sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    version, schemas, modules = printed.splitlines()
    assert version.startswith("vllmdiag ")
    assert schemas.startswith("schemas: diagnosis/1 ")
    assert {"typer", "rich", "msgspec", "psutil", "subprocess"} & set(modules.split()) == set()


def test_asking_for_help_imports_no_verb_and_no_rich() -> None:
    code = "import sys; from vllmdiag.cli.main import main; main(['--help']); print(*sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = printed.splitlines()[-1].split()
    assert "typer" in modules
    assert not [name for name in modules if name.startswith(("rich", "vllmdiag.cli.verbs.", "vllmdiag.sources"))]

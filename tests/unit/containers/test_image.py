"""The Dockerfile: read, and its build step done with what it copies. (No image is built here: there is no Docker.)"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.unit.commands import parse, stages

ROOT = Path(__file__).resolve().parents[3]
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
PAGES = ["docs/containers.md", "docs/kubernetes.md", "Dockerfile", "docs/kubernetes/debug-container.yaml"]


def _steps() -> list[tuple[str, str]]:
    """(instruction, the rest of it) of every step, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def _stage(number: int) -> list[tuple[str, str]]:
    """The steps of one stage, its FROM first."""
    starts = [i for i, (word, _) in enumerate(_steps()) if word == "FROM"]
    return _steps()[starts[number] : [*starts, None][number + 1]]


def _copied() -> list[str]:
    return [source for word, rest in _stage(0) if word == "COPY" for source in rest.split()[:-1]]


def test_every_step_is_one_that_docker_knows_and_both_stages_stand_on_the_same_slim_python() -> None:
    assert {word for word, _ in _steps()} <= INSTRUCTIONS
    assert [_stage(n)[0][1].partition(" ")[0] for n in (0, 1)] == ["python:${PYTHON}-slim"] * 2
    ((_, version),) = [step for step in _steps() if step[0] == "ARG"]
    assert tuple(map(int, version.partition("=")[2].split("."))) >= (3, 10)


def test_what_is_built_is_what_is_copied_from_the_first_stage_into_the_second() -> None:
    runs = " ".join(rest for word, rest in _stage(0) if word == "RUN")
    ((_, copy),) = [step for step in _stage(1) if step[0] == "COPY"]
    stage, source, target = copy.split()
    assert stage == "--from=build"
    assert _stage(0)[0][1].endswith(" AS build")
    assert source == target, "an environment of Python cannot be moved"
    assert f"python -m venv {source}" in runs
    assert f"{source}/bin/pip install" in runs
    assert f"PATH={target}/bin:$PATH" in dict(_stage(1))["ENV"]
    assert "RUN" not in dict(_stage(1)), "the last stage holds nothing but Python and the package"


def test_it_runs_as_nobody_and_hands_its_arguments_to_vllmdiag() -> None:
    last = dict(_stage(1))
    uid, _, gid = last["USER"].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["vllmdiag"]
    assert json.loads(last["CMD"]) == ["--help"]


def test_the_sources_that_it_copies_are_there_and_are_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for source in _copied():
        assert (ROOT / source).exists()
        assert any(fnmatch(source, rule) for rule in allowed), f"{source} is ignored"
    assert sorted(allowed) == sorted(_copied()), "what is not copied need not be sent to the builder"


def test_what_it_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    for source in _copied():
        target = tmp_path / "source" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    (wheel,) = WheelBuilder(str(tmp_path / "source")).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "vllmdiag/playbooks/idle.md" in names
    assert "vllmdiag/render/templates/report.css" in names
    assert any(name.endswith("entry_points.txt") for name in names)


def _inside(line: str) -> list[list[str]]:
    """Arguments of vllmdiag where another program runs it: docker, kubectl, python3 and the like."""
    found = []
    for words in stages(line):
        found += [stage[1:] for word in words if word.startswith("vllmdiag ") for stage in stages(word)]
        places = [i for i, word in enumerate(words) if re.fullmatch(r"(\S*/)?vllmdiag(\.pyz)?", word)]
        if places and words[0] != "vllmdiag" and not {"build", "cp"} & set(words[:2]):
            found.append(words[places[-1] + 1 :])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_runs_in_a_container_is_understood_by_the_command_line(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^(?:#   | {4})(\S.*)$", re.sub(r"\\\n#? *", "", text), re.MULTILINE)
    calls = [args for line in lines for args in _inside(line)]
    assert calls
    for args in calls:
        parse(args)


def test_a_command_that_does_not_exist_would_be_found() -> None:
    line = "kubectl exec pod -c vllmdiag -- vllmdiag nosuch | cat; docker run --health-cmd 'vllmdiag check' image"
    assert _inside(line) == [["nosuch"], ["check"]]

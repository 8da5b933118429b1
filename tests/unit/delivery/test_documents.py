"""README and docs: commands that exist, links that lead somewhere, figures and session that a live server gives."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.unit.commands import own_commands, parse
from tests.unit.delivery.conftest import ROOT
from tools import figures, session, verbs
from vllmdiag.diagnosis.view import view
from vllmdiag.lab.experiments import EXPERIMENTS
from vllmdiag.model.errors import ExitCode
from vllmdiag.sources.collect import collect

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "DESIGN.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_command_of_vllmdiag_is_understood_by_the_command_line(path: Path) -> None:
    for args in own_commands(path.read_text(encoding="utf-8")):
        parse(args)


def test_the_documents_use_the_tool_and_every_experiment() -> None:
    used = [" ".join(args) for path in DOCUMENTS for args in own_commands(path.read_text(encoding="utf-8"))]
    assert len(used) > 40
    assert all(f"lab experiment {name}" in used for name in EXPERIMENTS)


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(ROOT.glob("playbooks/*.md")), ROOT / "CHANGELOG.md"], ids=_name)
def test_every_link_to_a_file_leads_to_one(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link.partition("#")[0]).exists()]
    assert broken == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"]({p.name})" not in index]
    assert missing == []


def test_the_readme_lists_every_verb_in_the_words_of_the_help() -> None:
    assert verbs.written() == verbs.table(), "python -m tools.verbs"


def test_the_readme_names_every_exit_code() -> None:
    codes = README.partition("## For scripts")[2].partition("## ")[0]
    assert {int(number) for number in re.findall(r"\b\d{1,3}\b", codes)} >= {int(code) for code in ExitCode}


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"`make ([\w-]+)", path.read_text(encoding="utf-8"))}
    assert named <= targets
    assert named >= {"demo", "test", "lint", "bench", "pyz", "dist"}


def test_the_figures_are_those_of_the_recorded_servers() -> None:
    for name, text in figures.figures(figures.recorded()).items():
        assert (figures.DIRECTORY / name).read_text(encoding="utf-8") == text, "python -m tools.figures"


def test_a_live_server_gives_the_session_of_the_readme_and_can_be_drawn() -> None:
    with session.broken(session.SESSION) as lab:
        lines = session.form(session.session(lab.root))
        seen = view(collect(lab.root, window_s=1.0))
    assert lines == session.form(session.recorded()), "python -m tools.session"
    for text in figures.figures(dict.fromkeys(session.RECORDED, seen)).values():
        words = "".join(ET.fromstring(text).itertext())
        assert "Worker_TP1" in words
    assert "10 slots of 16 MiB" in figures.processes(seen)

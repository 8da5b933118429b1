"""The playbooks as texts: whole, in step with the catalogue, and with commands that exist and do no harm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.unit.commands import NUMBERS, calls_in, own_commands, parse, stages
from vllmdiag.catalogue.entries import catalogue
from vllmdiag.catalogue.playbooks import PLACEHOLDERS, Playbook, fill, playbooks, read
from vllmdiag.catalogue.terms import find, terms
from vllmdiag.render.markdown import commands
from vllmdiag.vllm import loglines

ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = ROOT / "playbooks"
FILES = sorted(DIRECTORY.glob("*.md"))
BOOKS = list(playbooks().values())
SECTIONS = [
    "What it means",
    "How it comes about",
    "How to be sure",
    "Change this first",
    "What not to do",
    "How to prevent it",
]

READ_ONLY = {
    "cat", "curl", "dmesg", "docker inspect", "du", "grep", "ip -br addr", "journalctl", "ls", "nvidia-smi", "ping",
    "ps", "py-spy dump --nonblocking", "sort", "ss", "stat -f", "tail", "top -b", "vllmdiag",
}  # fmt: skip
"""What may stand under "How to be sure"; of some programs only these uses."""

NEVER = re.compile(
    r"\b(gdb|strace|pystack|kill|pkill|killall|restart|reboot|rm|systemctl|unlink|truncate|tee|dd|nc|telnet|socat)\b|>"
    r"|--clean|--yes|-X |--data|-d "
)


def _section(book: Playbook, title: str) -> str:
    return book.body.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_cause_has_a_playbook_and_every_playbook_a_cause() -> None:
    assert [path.stem for path in FILES] == sorted(catalogue())
    assert [read(path.read_text(encoding="utf-8")).cause for path in FILES] == [path.stem for path in FILES]


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.cause)
def test_front_matter_says_what_the_catalogue_says(book: Playbook) -> None:
    entry = catalogue()[book.cause]
    assert (book.layer, book.severity, book.evidence, book.title) == (
        entry.layer,
        entry.severity,
        entry.evidence,
        entry.title,
    ), f"copy these words of the catalogue into playbooks/{book.cause}.md"
    assert book.versions


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.cause)
def test_a_playbook_has_its_six_sections_in_order_and_none_is_empty(book: Playbook) -> None:
    assert re.findall(r"^## (.+)$", book.body, re.MULTILINE) == SECTIONS
    assert all(len(_section(book, title).split()) > 5 for title in SECTIONS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_playbook_can_be_read_at_night(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert 40 <= len(lines) <= 90
    assert not [line for line in lines if len(line) > 120 and not line.startswith("evidence: ")]


def test_every_command_of_vllmdiag_in_every_playbook_is_understood_by_the_command_line() -> None:
    seen = {tuple(args) for book in BOOKS for args in own_commands(book.body)}
    assert {args[0] for args in seen} >= {"diagnose", "ps", "ring", "stacks", "shm", "endpoints", "client", "playbook"}
    for args in sorted(seen):
        parse(list(args))


def test_a_command_that_does_not_exist_would_be_found() -> None:
    assert own_commands("see `vllmdiag ring {pid} --nosuch` and\n```sh\nps | vllmdiag nosuch  # why\n```\n") == [
        ["nosuch"],
        ["ring", "2839", "--nosuch"],
    ]
    for args in (["ring", "2839", "--nosuch"], ["nosuch"], ["ring", "no-pid"]):
        with pytest.raises(typer.TyperException):
            parse(args)


def test_every_next_step_of_the_catalogue_is_understood_by_the_command_line() -> None:
    commands_ = [step.command for entry in catalogue().values() for step in entry.next]
    own = [args for command in commands_ for args in calls_in(fill(command, NUMBERS))]
    assert own
    for args in own:
        parse(args)


@pytest.mark.parametrize("book", [b for b in BOOKS if catalogue()[b.cause].next], ids=lambda book: book.cause)
def test_the_first_next_step_of_a_verdict_stands_in_its_playbook(book: Playbook) -> None:
    words = catalogue()[book.cause].next[0].command.split()
    assert any(set(words) <= {*line.split(), "{target}"} for line in commands(book.body)), " ".join(words)


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.cause)
def test_to_be_sure_vllmdiag_comes_first_and_nothing_is_changed(book: Playbook) -> None:
    lines = [fill(line, NUMBERS) for line in commands(_section(book, "How to be sure"))]
    assert lines[0].startswith("vllmdiag ")
    assert any(not line.startswith("vllmdiag ") for line in lines)
    for line in lines:
        for stage in stages(line):
            assert any(stage[: len(use.split())] == use.split() for use in READ_ONLY), f"{stage} may change something"
        assert not NEVER.search(re.sub(r"'[^']*'", "''", line)), line


@pytest.mark.parametrize(
    "line", ["kill -9 1", "gdb -p 1", "cat x > /dev/shm/y", "vllmdiag shm clean --yes", "systemctl restart vllm"]
)
def test_a_command_that_changes_something_would_be_found(line: str) -> None:
    assert NEVER.search(line)


def test_http_is_only_asked_with_a_deadline_past_any_proxy_and_by_get() -> None:
    calls = [line for book in BOOKS for line in commands(book.body) if line.startswith("curl")]
    assert calls
    assert all(
        "-m 5 " in call and "--noproxy '*'" in call and call.count("http://localhost:{port}/") == 1 for call in calls
    )


def test_room_in_shm_is_never_measured_with_df_through_proc() -> None:
    # df takes the mount of its caller for it; statfs on the path is right
    assert not [line for book in BOOKS for line in commands(book.body) if line.startswith("df")]


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.cause)
def test_links_lead_somewhere(book: Playbook) -> None:
    links = re.findall(r"\]\(([^)]+)\)", book.body)
    assert all((DIRECTORY / link).is_file() for link in links)
    assert f"{book.cause}.md" not in links
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in book.reports)
    assert len(set(book.reports)) == len(book.reports)


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.cause)
def test_log_lines_are_known_ones(book: Playbook) -> None:
    ids = {kind.id for kind in loglines.kinds()}
    assert {name.partition(":")[0] for name in book.log_lines} <= ids
    assert book.keywords


def test_placeholders_are_those_that_can_be_filled_in() -> None:
    used = {name for book in BOOKS for name in re.findall(r"(?<![{%])\{(\w+)\}", book.body)}
    assert used <= set(PLACEHOLDERS)
    assert used >= {"pid", "pids", "target", "engine", "server", "port"}


@pytest.mark.parametrize(
    "text",
    [
        "# no front matter\n",
        "---\ncause: idle\n---\nno title\n",
        "---\nnonsense\n---\n\n# t\nx\n",
        "---\ncause: a: b\n---\n\n# t\nx\n",
        "---\ncause: idle\nseverty: ok\n---\n\n# t\nx\n",
        "---\n  - item of nothing\n---\n\n# t\nx\n",
        "---\nkeywords: in one line\n---\n\n# t\nx\n",
    ],
)
def test_what_is_no_playbook_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read(text)


def test_text_that_yaml_would_read_otherwise_stands_in_quotes_and_comes_back_whole() -> None:
    text = DIRECTORY.joinpath("unknown.md").read_text(encoding="utf-8")
    changed = re.sub(r"^versions: .*$", r'versions: "0.9: all # of them"', text, flags=re.MULTILINE)
    assert read(changed).versions == "0.9: all # of them"


def test_terms_have_one_meaning_each_and_lead_somewhere() -> None:
    names = [name.lower() for term in terms() for name in (term.name, *term.also)]
    assert len(set(names)) == len(names)
    for term in terms():
        for other in term.see:
            if other.startswith("vllmdiag "):
                parse(shlex.split(other)[1:])
            else:
                assert other in catalogue() or find(other) is not None, f"{term.name}: {other}"


@pytest.mark.parametrize("word", ["slot", "HWM", "slow joiner", "out-of-band buffer", "PSS", "Out_Of-Band  BUFFER"])
def test_the_words_of_a_verdict_can_be_explained_however_they_are_written(word: str) -> None:
    term = find(word)
    assert term is not None
    assert len(term.text.split()) > 8

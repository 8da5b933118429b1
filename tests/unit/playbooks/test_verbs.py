from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.render import samples
from vllmdiag.catalogue.entries import catalogue
from vllmdiag.catalogue.playbooks import fill, playbooks, words_of
from vllmdiag.catalogue.terms import terms
from vllmdiag.cli.main import main
from vllmdiag.model.diagnosis import Diagnosis, Finding, Link, Subject
from vllmdiag.model.errors import ExitCode
from vllmdiag.render.document import json_schema, to_json
from vllmdiag.render.markdown import blocks, commands, write
from vllmdiag.render.page import Page, Style

SECTIONS = ("What it means", "How to be sure", "What not to do")


@pytest.fixture
def diagnosis(tmp_path: Path) -> Path:
    path = tmp_path / "diagnosis.json"
    path.write_text(to_json(samples.critical()), encoding="utf-8")
    return path


def _stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def _json(capsys: pytest.CaptureFixture[str], document: str) -> dict[str, object]:
    value: dict[str, object] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json.loads(json_schema(document))).validate(value)
    return value


@pytest.mark.parametrize("args", [["playbook"], ["playbook", "list"]])
def test_list_names_every_playbook(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(f"  {cause} " in out for cause in catalogue())


@pytest.mark.parametrize("cause", catalogue())
def test_show_writes_a_playbook_without_markup_or_braces(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["playbook", "show", cause]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert err == ""
    assert all(section in out for section in SECTIONS)
    assert "```" not in out
    assert "**" not in out
    assert "](" not in out
    assert not any("{" + name + "}" in out for name in ("pid", "pids", "target", "engine", "server", "port"))


def test_without_a_diagnosis_plain_names_stand_for_the_pids(capsys: pytest.CaptureFixture[str]) -> None:
    main(["playbook", "show", "process-stopped"])
    out = capsys.readouterr().out
    assert "kill -CONT PID" in out
    assert "vllmdiag ring TARGET" in out


def test_the_pids_of_a_diagnosis_stand_in_the_commands_and_its_verdict_is_shown(
    diagnosis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["playbook", "show", "--from", str(diagnosis)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "a process is stopped" in out.splitlines()[0]
    assert "kill -CONT 2863" in out
    assert "-p 2839,2852,2862,2863" in out
    assert "Worker_TP1 (pid 2863) is stopped (T)" in out


def test_a_diagnosis_is_read_from_stdin_and_markdown_written_for_a_ticket(
    diagnosis: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, diagnosis.read_bytes())
    assert main(["playbook", "show", "--from", "-", "--format", "markdown"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("# a process is stopped\n\n## What it means\n")
    assert "```sh\nkill -CONT 2863\n```" in out


def test_a_diagnosis_that_does_not_find_the_cause_fills_in_the_instance_and_says_so(
    diagnosis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["playbook", "show", "lost-wakeup", "--from", str(diagnosis)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "does not find this cause but process-stopped" in out
    assert "vllmdiag ring 2839 --window 8" in out
    assert "vllmdiag stacks PID --window 8" in out


def test_the_engine_of_the_chain_is_meant_where_there_are_several() -> None:
    chain = tuple(Link(subject=Subject(role=r, pid=p), doing="") for r, p in (("APIServer", 11), ("EngineCore", 22)))
    worker = Subject(role="Worker", pid=33)
    found = Finding(
        cause="worker-busy", layer=3, severity="warning", confidence="high", subject=worker, summary="", chain=chain
    )
    target = msgspec.structs.replace(samples.critical().target, api_server_pids=(10, 11), engine_pids=(21, 22))
    both = msgspec.structs.replace(samples.critical(), target=target, findings=(found,))
    words = words_of(both, "worker-busy")
    assert (words["pid"], words["server"], words["engine"]) == ("33", "11", "22")
    assert words_of(both, "idle")["engine"] == "21"


def test_a_subject_without_a_pid_leaves_its_plain_name() -> None:
    verdict = msgspec.structs.replace(samples.critical().verdict, subject=Subject(role="Worker", label="Worker_TP1"))
    words = words_of(msgspec.structs.replace(samples.critical(), verdict=verdict), "process-stopped")
    assert fill("{pid} {engine} {port} {pids} {other}", words) == "PID 2852 8000 2839,2852,2862,2863 {other}"
    assert fill("{target}", words_of(Diagnosis(verdict=verdict), "idle")) == "TARGET"


def test_match_names_the_best_first_says_why_and_what_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    line = "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"
    assert main(["playbook", "match", line]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("worker-dead: a worker has died\n")
    assert f"because   log line: {line}" in out
    assert "vllmdiag playbook show worker-dead" in out


def test_match_reads_a_log_of_any_bytes_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, b"\xff\xfe noise\n\x1b[31mRuntimeError: Bus error\n")
    assert main(["playbook", "match", "-"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "shm-too-small" in out
    assert "\x1b" not in out


def test_match_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["playbook", "match", "xyzzy"]) == ExitCode.UNKNOWN
    assert capsys.readouterr().out.startswith("no playbook fits this text\n")
    assert main(["playbook", "match", "xyzzy", "-f", "json"]) == ExitCode.UNKNOWN
    assert _json(capsys, "playbooks")["playbooks"] == []


def test_json_of_the_verbs_fits_its_published_schemas(diagnosis: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["playbook", "list", "-f", "json"])
    listed = _json(capsys, "playbooks")
    main(["playbook", "show", "--from", str(diagnosis), "-f", "json"])
    shown = _json(capsys, "playbooks")
    main(["playbook", "match", "EngineDeadError", "-f", "json"])
    matched = _json(capsys, "playbooks")
    main(["explain", "hwm", "-f", "json"])
    explained = _json(capsys, "explanations")
    main(["explain", "-f", "json"])
    everything = _json(capsys, "explanations")
    assert isinstance(listed["playbooks"], list)
    assert len(listed["playbooks"]) == len(playbooks())
    assert "kill -CONT 2863" in str(shown)
    assert matched["known_lines"]
    assert "HWM" in str(explained)
    assert isinstance(everything["explanations"], list)
    assert len(everything["explanations"]) == len(catalogue()) + len(terms())


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["playbook", "show"], 64),
        (["playbook", "show", "nosuch"], 64),
        (["playbook", "show", "idle", "busy"], 64),
        (["playbook", "show", "--from", "no/such/file"], 64),
        (["playbook", "list", "idle"], 64),
        (["playbook", "list", "-f", "markdown"], 64),
        (["playbook", "match"], 64),
        (["playbook", "nosuch"], 64),
        (["explain", "nosuchthing"], 64),
    ],
)
def test_a_wrong_call_says_what_why_or_next(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "next: vllmdiag " in err or "--from FILE" in err


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", b'{"schema": "vllmdiag.view/1"}', b"\xff"])
def test_what_is_no_diagnosis_is_bad_data(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["playbook", "show", "--from", str(path)]) == ExitCode.BAD_DATA
    assert "vllmdiag diagnose --format json" in capsys.readouterr().err


@pytest.mark.parametrize("cause", catalogue())
def test_every_cause_can_be_explained_and_leads_to_its_playbook(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", cause]) == ExitCode.OK
    out = capsys.readouterr().out
    assert catalogue()[cause].meaning in out
    assert f"vllmdiag playbook show {cause}" in out


def test_a_term_of_several_words_needs_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "out-of-band", "buffer"]) == ExitCode.OK
    once = capsys.readouterr().out
    main(["explain", "Out of Band Buffer"])
    assert capsys.readouterr().out == once
    assert "1 MiB" in once


def test_a_misspelt_name_leads_to_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "proces-stoped"]) == ExitCode.USAGE
    assert "vllmdiag explain process stopped" in capsys.readouterr().err


def test_explain_alone_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(name in out for name in (*catalogue(), *(term.name for term in terms())))


def test_ascii_and_the_file_are_honoured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.txt"
    assert main(["--ascii", "playbook", "show", "worker-dead", "-o", str(path)]) == ExitCode.OK
    assert capsys.readouterr().out == ""
    assert path.read_text(encoding="utf-8").isascii()


def test_markdown_becomes_lines_of_a_page() -> None:
    page = Page(Style(width=40))
    write(
        page,
        "## Head\n\nSome `code` and **weight**, joined\nover lines, [there](other.md).\n\n"
        "- an item\n  that goes on\n- another\n1. first\n\n```sh\nps -p 1  # why\n\nls\n```\n",
    )
    assert page.text() == (
        "Head\n"
        "  Some code and weight, joined over\n"
        "  lines, there.\n"
        "  - an item that goes on\n"
        "  - another\n"
        "  1. first\n"
        "    ps -p 1  # why\n"
        "    ls\n"
    )


def test_commands_are_lines_of_code_without_their_comment() -> None:
    assert list(commands("text `ls`\n```sh\nps -p 1  # why\n\n# a comment\ngrep '#' x\n```\nls\n")) == [
        "ps -p 1",
        "grep '#' x",
    ]


@given(st.text())
def test_no_text_breaks_the_reader_of_markdown(text: str) -> None:
    assert all(block.kind in {"heading", "text", "item", "code"} for block in blocks(text))
    write(page := Page(Style(width=30)), text)
    assert page.text().endswith("\n")

"""Every node is asked at once and none is waited for in vain: real children that answer, hang, fail or cannot start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllmdiag.fleet.ask import Errand, ask, failure
from vllmdiag.fleet.command import far_end
from vllmdiag.fleet.engines.files import read_files
from vllmdiag.fleet.engines.shells import kubectl, node_set, slurm, ssh
from vllmdiag.fleet.wire import End, Hello, Seen, encode
from vllmdiag.model.errors import HelperMissingError, TargetError, UsageError
from vllmdiag.model.fleet import NodeReport

from .nodes import state

ANSWER = encode(Hello(tool="1", instances=1)) + encode(Seen(pid=1, snapshot=state("idle"))) + encode(End())


def child(code: str, stdin: bytes = b"") -> Errand:
    return Errand("n", (sys.executable, "-S", "-c", f"import os, sys, time\n{code}"), stdin)


def one(errand: Errand, deadline_s: float = 60.0) -> NodeReport:
    (found,) = ask([errand], deadline_s, 1, lambda _: None)
    return found


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    file = tmp_path / "answer"
    file.write_bytes(ANSWER)
    return file


def test_an_answer_is_taken(answer: Path) -> None:
    found = one(Errand("n", ("cat", str(answer))))
    assert (found.outcome, len(found.snapshots), found.tool) == ("answered", 1, "1")


def test_an_answer_counts_even_where_the_transport_fails_afterwards(answer: Path) -> None:
    assert one(Errand("n", ("sh", "-c", f"cat {answer}; exit 255"))).outcome == "answered"


def test_one_that_hangs_is_ended_at_its_deadline_with_all_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"pid = os.fork()\nif pid: open({str(file)!r}, 'w').write(str(pid))\ntime.sleep(600)"
    found = one(child(code), deadline_s=3.0)
    assert (found.outcome, found.problem) == ("silent", "no answer within 3 s")
    # The session was killed as a whole; its orphan may stand as a zombie until init takes it.
    stat = Path(f"/proc/{file.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_one_that_greets_and_then_hangs_says_so(tmp_path: Path) -> None:
    greeting = tmp_path / "greeting"
    greeting.write_bytes(encode(Hello(instances=1)))
    found = one(Errand("n", ("sh", "-c", f"cat {greeting}; sleep 600")), deadline_s=3.0)
    assert (found.outcome, found.problem) == ("silent", "it greeted and did not finish within 3 s")


def test_one_that_fails_says_why() -> None:
    found = one(child("sys.stderr.write('ssh: connect: Connection refused\\n'); sys.exit(255)"))
    assert (found.outcome, found.problem) == ("refused", "exit code 255: ssh: connect: Connection refused")


def test_a_transport_that_is_not_there_is_a_refusal() -> None:
    assert one(Errand("n", ("no-such-program",))).outcome == "refused"


def test_a_missing_tool_there_is_told_from_other_failures() -> None:
    assert "--ship" in failure(127, "sh: 1: vllmdiag: not found")
    assert "--ship" in failure(1, 'exec: "vllmdiag": executable file not found in $PATH')
    assert failure(1, "") == "exit code 1"


def test_a_flood_on_stderr_and_a_reader_that_leaves_early_do_no_harm() -> None:
    flood = child("sys.stderr.write('x' * 5_000_000); sys.exit(3)", b"y" * 1_000_000)
    assert one(flood).outcome == "refused"


def test_no_more_children_than_allowed_at_a_time_and_reports_in_order(tmp_path: Path) -> None:
    # Each leaves a mark while it runs, and fails where it finds more of them than there may be.
    code = (
        "import pathlib\n"
        f"home = pathlib.Path({str(tmp_path)!r})\nmine = home / str(os.getpid())\nmine.touch()\ntime.sleep(0.1)\n"
        "many = len(list(home.iterdir()))\nmine.unlink()\nsys.exit(many > 3)"
    )
    errands = [Errand(f"n{k}", child(code).argv) for k in range(12)]
    done: list[str] = []
    reports = ask(errands, 60.0, 3, lambda report: done.append(report.node))
    assert [r.node for r in reports] == [e.node for e in errands]
    assert sorted(done) == sorted(e.node for e in errands)
    assert {r.problem for r in reports} == {"it said nothing at all"}, "exit code 0: never more than three"


# -- the command on the node -------------------------------------------------------------------------------------------


def test_a_program_that_is_sent_runs_from_memory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:], file=sys.stderr); sys.exit(5)")
    far = far_end(1.0, 20.0, (sys.executable, "-S"), program)
    found = one(Errand("n", far.words, far.stdin))
    assert found.problem == "exit code 5: ['fleet', 'node', '--window', '1', '--deadline', '20']"


def test_what_cannot_be_sent_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        far_end(1.0, 20.0, ship=tmp_path / "none.pyz")


# -- who is asked ------------------------------------------------------------------------------------------------------


def test_node_sets_have_ranges_steps_and_exclusions() -> None:
    assert node_set("gpu[01-03]") == ("gpu01", "gpu02", "gpu03")
    assert node_set("a, b,a") == ("a", "b")
    assert node_set("root@a,root@b") == ("root@a", "root@b")
    assert len(node_set("gpu[001-480]!gpu[010-019]")) == 470


@pytest.mark.parametrize("text", ["", " , ", "gpu[1-", "gpu[3-1]"])
def test_what_is_no_node_set_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        node_set(text)


def test_ssh_never_asks_a_question_and_takes_no_node_for_an_option() -> None:
    (errand,) = ssh("-oProxyCommand=x", far_end(1.0, 20.0))
    assert errand.argv[:3] == ("ssh", "-o", "BatchMode=yes")
    assert errand.argv[errand.argv.index("-oProxyCommand=x") - 1] == "--"


def test_a_job_of_slurm_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(TargetError):
        slurm(far_end(1.0, 20.0))


def test_a_program_of_the_engine_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HelperMissingError):
        kubectl("app=vllm", far_end(1.0, 20.0))


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_nodes_that_answered_garbage(tmp_path: Path, answer: Path) -> None:
    (tmp_path / "broken.json").write_text("{}broken")
    reports = read_files([tmp_path], lambda _: None)
    assert {r.node: r.outcome for r in reports} == {"answer": "answered", "broken.json": "garbage"}
    assert os.fspath(answer)

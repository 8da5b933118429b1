from __future__ import annotations

import pytest

from tests.unit.diagnosis import startup_cases
from tests.unit.diagnosis import test_causes as causes
from tests.unit.diagnosis.scenario import Server
from vllmdiag.diagnosis.expectations import WORDS, compare, parse
from vllmdiag.diagnosis.judge import diagnose
from vllmdiag.diagnosis.profiles import Rule
from vllmdiag.diagnosis.view import view
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.watch.checks import Question, check


def unmet(snapshot: Snapshot, *texts: str) -> dict[str, str]:
    found = compare(parse(texts), view(snapshot), diagnose(snapshot))
    return {e.name: e.found for e in found if not e.met}


def test_a_healthy_server_is_what_is_expected_of_it() -> None:
    server = Server(metrics=({"num_requests_running": 0.0}, {"num_requests_running": 0.0}))
    wanted = "tp=2,pp=1,dp=1,workers=2,ready,health,metrics,ring=idle,api-servers=1,version=0.32.0,port=8000,cause=idle"
    assert unmet(server.snapshot(), wanted) == {}


def test_one_worker_and_no_worker_process_are_both_tp_1() -> None:
    assert unmet(Server(tp=1).snapshot(), "tp=1,workers=1") == {}
    assert unmet(Server(tp=1, uniproc=True).snapshot(), "tp=1,workers=0,ring=none") == {}


def test_what_is_not_so_is_named_with_what_was_found() -> None:
    found = unmet(Server().snapshot(), "tp=4", "api-servers=2,ring=moving,version=0.12.0,model=other")
    assert found == {"tp": "2", "api-servers": "1", "ring": "idle", "version": "0.32.0", "model": "m"}


def test_a_server_that_starts_is_not_ready() -> None:
    server = Server()
    startup_cases.loads_slowly(server)
    assert unmet(server.snapshot(), "ready,health,metrics") == {
        "ready": "starting",
        "health": "not known",
        "metrics": "not known",
    }


def test_a_server_with_a_fault_is_not_ready_although_it_answers() -> None:
    server = Server()
    causes.worker_stopped(server)
    assert unmet(server.snapshot(), "health") == {}
    assert unmet(server.snapshot(), "ready") == {"ready": "/health 200, process-stopped"}


def test_an_expectation_that_is_not_met_fails_every_profile() -> None:
    question = Question(rule=Rule(profile="ci"), wanted=parse(["tp=8"]))
    result = check(question, lambda _window_s: Server().snapshot())
    assert (result.status, result.exit_code) == ("critical", 2)
    assert result.summary.startswith("expected tp 8, found 2")


@pytest.mark.parametrize("word", ["tp", "tp=", "ready=yes", "colour=red", ""])
def test_what_cannot_be_expected_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"nothing is called|needs a value|takes no value"):
        parse([word])


def test_every_word_of_the_help_can_be_expected() -> None:
    for word in WORDS:
        assert parse([word.replace("...", "1")])

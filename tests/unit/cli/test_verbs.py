"""Every verb from the command line to its page, with what the machine would show put in place of the machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests.unit.render import samples
from tests.unit.render.goldens import DIRECTORY
from vllmdiag.cli.main import main
from vllmdiag.model.base import Missing
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.errors import ExitCode
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceLine, InstanceView


class Machine:
    """Stands for the machine: what it shows, and what it was asked."""

    def __init__(self) -> None:
        self.view: InstanceView = samples.instance()
        self.diagnosis: Diagnosis = samples.critical()
        self.instances: tuple[InstanceLine, ...] = samples.instances()[:1]
        self.asked: list[tuple[int | None, int | None, float, str]] = []
        self.probed = 0

    def collect(
        self,
        target: int | None,
        port: int | None,
        window_s: float,
        depth: str,
        progress: Callable[[str], None],
        *,
        asked: float,
        meanwhile: Callable[[], None],
    ) -> Snapshot:
        self.asked.append((target, port, window_s, depth))
        progress("looking")
        meanwhile()
        return Snapshot()

    def with_probes(self, snapshot: Snapshot, progress: Callable[[str], None]) -> Snapshot:
        self.probed += 1
        return snapshot


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()

    def put(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    put(
        "vllmdiag.sources.collect",
        collect=machine.collect,
        collect_host=Snapshot,
        list_instances=lambda: machine.instances,
    )
    put("vllmdiag.sources.probe", with_probes=machine.with_probes)
    put("vllmdiag.diagnosis.judge", diagnose=lambda _snapshot: machine.diagnosis)
    put("vllmdiag.diagnosis.view", view=lambda _snapshot: machine.view)
    return machine


@pytest.mark.parametrize(
    ("verb", "page"),
    [
        ("ps", "ps.txt"),
        ("endpoints", "endpoints.txt"),
        ("shm", "shm.txt"),
        ("shm clean", "shm-clean.txt"),
        ("ring", "ring.txt"),
        ("stacks", "stacks.txt"),
        ("client", "client.txt"),
        ("diagnose", "critical.txt"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_a_verb_prints_its_page_and_nothing_else(verb: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(verb.split())
    assert capsys.readouterr() == ((DIRECTORY / page).read_text(encoding="utf-8"), "")


@pytest.mark.parametrize(
    ("verb", "sections"),
    [
        ("ps", {"members"}),
        ("endpoints", {"endpoints"}),
        ("shm", {"mounts", "segments", "members"}),
        ("ring", {"rings"}),
        ("stacks", {"stacks"}),
        ("client", {"clients"}),
    ],
)
@pytest.mark.usefixtures("machine")
def test_json_of_a_verb_is_one_document_with_its_sections_alone(
    verb: str, sections: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--format", "json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "vllmdiag.view/1"
    assert document["missing"]
    lists = {name for name, value in document.items() if isinstance(value, list) and value and name != "missing"}
    assert lists == sections


@pytest.mark.parametrize(
    ("diagnosis", "code"),
    [(samples.idle(), 0), (samples.warning(), 1), (samples.critical(), 2), (samples.unknown(), 3)],
)
def test_the_exit_code_of_diagnose_is_the_verdict_in_every_format(
    diagnosis: Diagnosis, code: int, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.diagnosis = diagnosis
    assert main(["diagnose"]) == code
    capsys.readouterr()
    assert main(["diagnose", "--format", "json"]) == code
    assert msgspec.json.decode(capsys.readouterr().out, type=Diagnosis) == diagnosis


@pytest.mark.usefixtures("capsys")
def test_target_port_and_window_reach_the_collector_with_the_depth_of_the_verb(machine: Machine) -> None:
    main(["ps", "2839"])
    main(["diagnose", "--port", "8000", "--window", "10"])
    main(["ring", "--peek", "2839"])
    assert machine.asked == [(2839, None, 1.0, "ps"), (None, 8000, 10.0, "diagnose"), (2839, None, 1.0, "peek")]


@pytest.mark.usefixtures("capsys")
def test_endpoints_are_probed_only_where_it_is_asked_for(machine: Machine) -> None:
    for verb in ("endpoints", "diagnose"):
        before = machine.probed
        main([verb])
        assert machine.probed == before
        main([verb, "--probe-zmq"])
        assert machine.probed == before + 1


@pytest.mark.parametrize("verb", ["endpoints", "diagnose"])
def test_the_help_says_what_a_probe_costs(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == ExitCode.OK
    said = " ".join(capsys.readouterr().out.split())
    assert "It costs the server one connection to each" in said


def test_ps_lists_the_instances_where_there_are_several_and_none_is_chosen(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.instances = samples.instances()
    assert main(["ps"]) == ExitCode.OK
    assert capsys.readouterr().out == (DIRECTORY / "ps-instances.txt").read_text(encoding="utf-8")
    assert machine.asked == []
    main(["ps", "2839"])
    assert machine.asked


def test_a_verb_that_could_see_nothing_is_not_ok(machine: Machine) -> None:
    hole = Missing(what="stacks", why="EPERM", next="sudo vllmdiag stacks")
    machine.view = msgspec.structs.replace(samples.instance(), stacks=(), missing=(hole,))
    assert main(["stacks"]) == ExitCode.UNKNOWN
    machine.view = msgspec.structs.replace(samples.instance(), stacks=(), missing=())
    assert main(["stacks"]) == ExitCode.OK


@pytest.mark.usefixtures("machine")
def test_ascii_and_colour_are_understood_before_and_after_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for args in (["--ascii", "--color", "always", "ring"], ["ring", "--ascii", "--color", "always"]):
        main(args)
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert pages[0].isascii()
    assert "\x1b[1;31m" in pages[0]


@pytest.mark.usefixtures("machine")
def test_what_stands_after_the_verb_rules(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--color", "always", "ring", "--color", "never"])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.usefixtures("machine")
def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ps", "-v"])
    said = capsys.readouterr()
    assert said.err == "vllmdiag: looking\n"
    assert "looking" not in said.out

"""The experiments measure what they say: the numbers that must come out, came out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from vllmdiag.lab.experiments import EXPERIMENTS

COMMAND = [sys.executable, "-m", "vllmdiag", "lab", "experiment"]


def rows(name: str) -> dict[str, str]:
    done = subprocess.run([*COMMAND, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = done.stdout.split("measured\n")[1].split("\n\n")[0]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in measured.splitlines())


def mib(text: str) -> float:
    return float(text.partition(" MiB")[0])


def test_the_list_names_them_all() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(EXPERIMENTS)


def test_an_unknown_experiment_is_a_usage_error() -> None:
    done = subprocess.run([*COMMAND, "alchemy"], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "no experiment" in done.stderr


def test_isolation() -> None:
    found = rows("isolation")
    assert found["private: what the parent reads then"] == "parent"
    assert found["shared: what the parent reads then"] == "child"


@pytest.mark.needs("root")
def test_isolation_shows_the_pages() -> None:
    found = rows("isolation")
    assert "the same as" in found["private: physical page of the child before it writes"]
    assert "another than" in found["private: physical page of the child after it has written"]
    assert "the same as" in found["shared: physical page of the child after it has written"]


def test_identity() -> None:
    found = rows("identity")
    assert [found[f"engine {rank} received"] for rank in range(3)] == ["nothing", "for engine 1", "nothing"]
    assert found["the same with ROUTER_MANDATORY"].startswith("send fails")


def test_out_of_band() -> None:
    found = rows("oob")
    assert int(found["in band: bytes in the pickle"]) > 8 << 20
    assert int(found["out of band: bytes beside it"]) == 8 << 20
    assert found["out of band: memory allocated to encode it"] == "0.0 MiB, 0.0 copies"
    assert found["a buffer of 1048575 bytes"] == "1 part in the slot"
    assert found["a buffer of 1048576 bytes"] == "2 parts in the slot"


def test_backpressure() -> None:
    found = rows("backpressure")
    assert found["messages published while reader 1 reads nothing"] == found["slots of the ring"] == "10"
    assert found["flags then"] == " ".join(["10"] * 10)


def test_slow_joiner() -> None:
    found = rows("slow-joiner")
    lost, kept = found.values()
    assert int(lost.split()[0]) < 1000
    assert kept == "1000 of 1000 received"


def test_high_water_marks() -> None:
    found = rows("hwm")
    sent = {
        name.split(",")[0]: value for name, value in found.items() if "messages sent" in name and "no mark" not in name
    }
    assert sent["PUSH"].endswith("then send would wait")
    assert sent["PUB"].endswith("send never waits")
    assert mib(found["PUSH, no mark (as in vLLM): memory of the process grew by"]) > 40
    assert int(found["PUB, marks of 10: of those the reader finds later"]) < 5000


def test_copy_on_write() -> None:
    after_fork, after_reading, after_writing, after_looking = (
        mib(value) for name, value in rows("cow").items() if name.startswith("the child")
    )
    assert after_reading - after_fork < 1
    assert 15 < after_writing - after_reading < 18
    assert after_looking - after_writing > 20

from __future__ import annotations

import pytest

from tests.unit.check import results
from vllmdiag.model.check import CheckResult
from vllmdiag.model.errors import TargetError, UsageError
from vllmdiag.watch.exporter import _Checks, address


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        (":9400", ("0.0.0.0", 9400)),
        ("9400", ("0.0.0.0", 9400)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_is_read_as_people_write_it(text: str, place: tuple[str, int]) -> None:
    assert address(text) == place


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        address(text)


def test_scrapes_that_come_close_together_share_one_check() -> None:
    asked = []

    def ask() -> CheckResult:
        asked.append(1)
        return results.fine()

    patient, eager = _Checks(ask, 3600.0), _Checks(ask, 0.0)
    first, second = list(patient.collect()), list(patient.collect())
    assert [m.name for m in first] == [m.name for m in second]
    assert len(asked) == 1
    list(eager.collect())
    list(eager.collect())
    assert len(asked) == 3


def test_a_check_that_cannot_be_made_is_a_metric_and_no_traceback() -> None:
    def ask() -> CheckResult:
        raise TargetError("no vLLM process is running here")

    found = {m.name: m.samples[0] for m in _Checks(ask, 0.0).collect()}
    assert found["vllmdiag_status"].value == 3
    assert found["vllmdiag_failed"].labels == {"code": "no_target", "what": "no vLLM process is running here"}

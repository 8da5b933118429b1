from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.vllm.versions import in_range, parse


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.11.2", (0, 11, 2)),
        ("v0.9", (0, 9, 0)),
        ("0.11.2.dev3+g1a2b3c4", (0, 11, 2)),
        ("0.14.0rc1", (0, 14, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
    ],
)
def test_a_version_is_its_release(text: str, version: tuple[int, ...]) -> None:
    assert parse(text) == version


@pytest.mark.parametrize("text", ["", "dev", "unknown", "0.1.dev1+gdeadbee"])
def test_a_version_that_tells_nothing_is_unknown(text: str) -> None:
    assert parse(text) is None


def test_both_ends_of_a_range_belong_to_it() -> None:
    assert in_range("0.10.2", "0.10", "0.10")
    assert in_range("0.10.0", "0.10", None)
    assert not in_range("0.11.0", None, "0.10")
    assert not in_range("0.9.2", "0.10", None)
    assert in_range("0.32.0", "0.8.5", None)


def test_releases_compare_as_numbers() -> None:
    assert not in_range("0.9.2", "0.10.1", None)
    assert in_range("0.10.1", "0.9.2", None)


def test_an_unknown_version_is_in_every_range() -> None:
    assert in_range(None, "0.10", "0.11")
    assert in_range("dev", "0.10", "0.11")


@given(st.text())
def test_any_text_is_accepted(text: str) -> None:
    version = parse(text)
    assert version is None or len(version) == 3

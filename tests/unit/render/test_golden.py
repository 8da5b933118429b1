from __future__ import annotations

import json
import re
from collections.abc import Callable

import jsonschema
import msgspec
import pytest

from tests.unit.render import samples
from tests.unit.render.goldens import DIRECTORY, PAGES
from vllmdiag.model.diagnosis import Diagnosis
from vllmdiag.model.snapshot import Snapshot
from vllmdiag.model.view import InstanceView
from vllmdiag.render.document import DOCUMENTS, json_schema, to_json
from vllmdiag.render.page import Style
from vllmdiag.render.verdict import diagnosis_text

DIAGNOSES = [samples.critical, samples.idle, samples.unknown, samples.warning]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_golden_file_says(name: str) -> None:
    assert PAGES[name]() == (DIRECTORY / name).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == set(PAGES)


@pytest.mark.parametrize("build", DIAGNOSES)
def test_a_diagnosis_fits_its_published_schema_and_survives_json(build: Callable[[], Diagnosis]) -> None:
    document = to_json(build())
    jsonschema.Draft202012Validator(json.loads(json_schema("diagnosis"))).validate(json.loads(document))
    assert msgspec.json.decode(document, type=Diagnosis) == build()


def test_a_view_fits_its_published_schema_and_survives_json() -> None:
    document = to_json(samples.instance())
    jsonschema.Draft202012Validator(json.loads(json_schema("view"))).validate(json.loads(document))
    assert msgspec.json.decode(document, type=InstanceView) == samples.instance()


def test_a_schema_refuses_another_document() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json.loads(json_schema("diagnosis"))).validate(json.loads(to_json(Snapshot())))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_schema_is_a_sound_json_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(json_schema(name)))


@pytest.mark.parametrize("build", DIAGNOSES)
def test_the_verdict_stands_in_the_first_line(build: Callable[[], Diagnosis]) -> None:
    diagnosis = build()
    first = diagnosis_text(diagnosis, Style()).splitlines()[0]
    assert first.startswith(diagnosis.verdict.status.upper())
    assert diagnosis.verdict.summary in first


@pytest.mark.parametrize("build", DIAGNOSES)
def test_colour_adds_nothing_but_escape_sequences(build: Callable[[], Diagnosis]) -> None:
    coloured = diagnosis_text(build(), Style(colour=True))
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == diagnosis_text(build(), Style())


def test_nothing_that_could_not_be_observed_is_kept_back() -> None:
    text = diagnosis_text(samples.unknown(), Style())
    assert "2839,2852,2862-2865" in text
    assert all(hole.why in text for hole in samples.unknown().missing)
